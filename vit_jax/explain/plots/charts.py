"""Draws charts: points, lines and error bars on axes."""

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from vit_jax.explain.colours import COLOURS
from vit_jax.explain.plots import style


class Series(NamedTuple):
  """Points of one kind in a `Panel`.

  Attributes:
    label: the text in the legend.
    x, y: the coordinates of the points.
    std: the standard deviation of each y, or None.
    joined: whether to draw a line through the points.
  """

  label: str
  x: Sequence[float]
  y: Sequence[float]
  std: Sequence[float] | None = None
  joined: bool = False


class Panel(NamedTuple):
  """One of the charts that `panels` draws. Its x axis is logarithmic."""

  title: str
  xlabel: str
  ylabel: str
  series: Sequence[Series]
  ticks: dict[float, str] | None = None


@style.apply_style
def heads(mean: np.ndarray, std: np.ndarray, uniform: float) -> Figure:
  """Draws each head's attention distance against its layer (ViT paper, figure 7 right).

  Args:
    mean: the mean over images [L, M], in pixels.
    std: the standard deviation over images [L, M].
    uniform: the distance under uniform attention, drawn as a dashed line.
  """
  L, M = mean.shape
  figure = Figure((3.4, 2.9), layout='constrained')
  ax = figure.subplots()
  dashes = dict(color='0.6', linewidth=0.7, linestyle=(0, (4, 3)), zorder=0)
  ax.axhline(uniform, label='Uniform attention', **dashes)
  colours = matplotlib.colormaps['viridis'](np.linspace(0, 0.9, M))
  for m in range(M):
    # Shift the heads a little, so that their bars do not overlap.
    x = np.arange(L) + 0.25 * ((m + 0.5) / M - 0.5)
    style = dict(color=colours[m], markersize=2.5, elinewidth=0.5)
    ax.errorbar(x, mean[:, m], std[:, m], fmt='o', label=f'Head {m + 1}', **style)
  ax.set(xlabel='Network depth (layer)', ylabel='Mean attention distance (pixels)')
  ax.set_xlim(-0.5, L - 0.5)
  ax.set_ylim(0, 1.12 * max(uniform, (mean + std).max()))
  ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  shown = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
  if M > 8:
    # Name only a few heads, as the paper does.
    few = ('Head 1', 'Head 2', 'Head 3', f'Head {M}', 'Uniform attention')
    shown = {name: shown[name] for name in few}
  place = dict(loc='outside lower center', ncols=3)
  figure.legend(shown.values(), shown.keys(), columnspacing=1.2, **place)
  return figure


@style.apply_style
def panels(shown: Sequence[Panel]) -> Figure:
  """Draws panels side by side, each with a logarithmic x axis."""
  width = style.WIDTH if len(shown) > 1 else 3.4
  figure = Figure((width, 2.5 if len(shown) < 3 else 2.2), layout='constrained')
  numbers: dict[str, int] = {}
  for ax, panel in zip(
    figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True
  ):
    for series in panel.series:
      # Colours and markers repeat after seven series.
      number = numbers.setdefault(series.label, len(numbers))
      fmt = dict(color=COLOURS[number % 7], marker=style.MARKERS[number % 7])
      fmt |= dict(linestyle='-' if series.joined else 'none', markeredgewidth=0)
      points = series.x, series.y, series.std
      ax.errorbar(*points, label=series.label, elinewidth=0.7, **fmt)
    ax.set_xscale('log')
    ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    if panel.ticks:
      ax.set_xticks(list(panel.ticks), panel.ticks.values(), size=7)
      ax.minorticks_off()
    else:
      ax.xaxis.set_minor_formatter(NullFormatter())
    ax.margins(0.09)
    ax.grid(color='0.92', linewidth=0.5)
    ax.set_axisbelow(True)
  handles = {}
  for ax in figure.axes:
    handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
  most = 5 if len(shown) > 1 else 3
  place = dict(loc='outside upper center', ncols=min(most, len(handles)))
  figure.legend(handles.values(), handles.keys(), columnspacing=1.2, **place)
  return figure
