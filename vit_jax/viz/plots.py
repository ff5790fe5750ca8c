"""Figures for a paper, from arrays: the one file that knows matplotlib.

Functions return a `Figure` without pyplot's global state, for `save` or a notebook.
Widths are those of one column of text, 5.5 inches.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullFormatter

from vit_jax import resample

_WIDTH = 5.5
_STYLE = {
  'font.family': ['STIXGeneral', 'DejaVu Serif'],  # both come with matplotlib
  'mathtext.fontset': 'stix',
  'font.size': 8,
  'axes.titlesize': 9,
  'axes.labelsize': 9,
  'legend.fontsize': 7.5,
  'legend.frameon': False,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.linewidth': 0.6,
  'xtick.major.width': 0.6,
  'ytick.major.width': 0.6,
  'xtick.major.size': 2.5,
  'ytick.major.size': 2.5,
  'lines.linewidth': 1.0,
  'lines.markersize': 4,
  'image.interpolation': 'nearest',
  'savefig.dpi': 300,
  'pdf.fonttype': 42,  # text that can be searched and edited
  'svg.hashsalt': 'vit_jax',  # names of parts that do not change from run to run
}
# Okabe and Ito's, safe for colour-blind readers; without yellow, faint on white.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#444444')
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X')


class Series(NamedTuple):
  """Points of one kind in a `Panel`.

  Attributes:
    label: in the legend.
    x, y: of the points.
    std: of each y, or None.
    names: written beside the points, or None.
    joined: whether a line goes through the points.
  """

  label: str
  x: Sequence[float]
  y: Sequence[float]
  std: Sequence[float] | None = None
  names: Sequence[str] | None = None
  joined: bool = False


class Panel(NamedTuple):
  """One pair of axes of `panels`; `ticks` are {x: text}, or None; x is logarithmic."""

  title: str
  xlabel: str
  ylabel: str
  series: Sequence[Series]
  ticks: dict[float, str] | None = None


def _styled(draw: Callable) -> Callable:
  @functools.wraps(draw)
  def styled(*args, **kwargs):
    with matplotlib.rc_context(_STYLE):
      return draw(*args, **kwargs)

  return styled


@_styled
def save(figure: Figure, path: str | Path) -> None:
  """Writes a figure; the format is that of the suffix, .png, .pdf or .svg.

  The file has no date in it, so that the same numbers give the same file.
  """
  empty = {'.png': {'Software': None}, '.pdf': {'CreationDate': None}}
  metadata = empty.get(Path(path).suffix, {'Date': None})
  with warnings.catch_warnings():  # of class names in scripts without a font here
    warnings.filterwarnings('ignore', message='Glyph .* missing from')
    figure.savefig(path, bbox_inches='tight', pad_inches=0.03, metadata=metadata)


@_styled
def maps(
  images: np.ndarray,
  values: np.ndarray,
  title: str,
  captions: Sequence[str] | None = None,
  overlay: str = 'mask',
) -> Figure:
  """Draws images beside their maps (ViT paper, figures 6 and 14).

  Args:
    images: [B, H, W, C] in [0, 1], C 1 or 3.
    values: [B, h, w], resized to the images' size.
    title: of the maps' columns.
    captions: one per image, above it.
    overlay: 'mask', the image times map / maximum, as in the paper; 'heat', the map as
      colour; or 'signed', red where the map is positive and blue where it is negative.
  """
  B, H, W, _ = images.shape
  across = 1 if B <= 3 else 2 if B <= 8 else 4
  down = -(-B // across)
  near, far, above = 0.05, 0.14, 0.16 if captions else 0.0
  side = min(1.35, (_WIDTH + far) / across / 2 - (near + far) / 2)
  pair, row = 2 * side + near + far, side * H / W + above + near
  figure = Figure((across * pair - far, down * row - near))
  place = _placer(figure)
  for i in range(B):
    x, y = i % across * pair, i // across * row + above
    shown = _enlarged(images[i], values[i])
    for k, image in enumerate((shown[0], _OVERLAYS[overlay](*shown))):
      ax = place(x + k * (side + near), y, side, side * H / W)
      ax.imshow(image)
      ax.set_axis_off()
      if i < across:
        at = (0.5, 1 + (above + 0.03) / (side * H / W))
        ax.text(*at, ('Input', title)[k], **_over(ax), size=9)
      if captions and k == 0:
        most = int(2 * side / 0.048)  # characters of 7 points
        text = (
          captions[i] if len(captions[i]) <= most else captions[i][: most - 1] + '…'
        )
        ax.text(1 + near / 2 / side, 1.02, text, **_over(ax), size=7)
  return figure


def _placer(figure: Figure) -> Callable:
  """Returns (x, y, width, height) -> axes there, inches from the upper left corner."""
  W, H = figure.get_size_inches()

  def place(x, y, width, height):
    return figure.add_axes((x / W, 1 - (y + height) / H, width / W, height / H))

  return place


def _over(ax) -> dict:
  return dict(transform=ax.transAxes, ha='center', va='bottom')


def _enlarged(image: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns (the image with three channels, the map), of one size, 128 px or more."""
  times = max(1, -(-128 // min(image.shape[:2])))
  larger = lambda x: x.repeat(times, 0).repeat(times, 1)
  by_pixel = value.shape == image.shape[:2]
  image = np.clip(image, 0, 1) @ np.ones((1, 3)) if image.shape[2] == 1 else image
  image = larger(np.clip(image, 0, 1))
  if by_pixel:
    return image, larger(value)
  size = zip(value.shape, image.shape[:2], strict=True)
  rows, columns = (resample.matrix(a, b, 'bilinear', antialias=False) for a, b in size)
  return image, resample.apply(value, rows, columns)


def _mask(image, value):
  return image * _shares(value)[..., None]


def _heat(image, value):
  colour = matplotlib.colormaps['inferno'](_shares(value))[..., :3]
  return 0.4 * _grey(image) + 0.6 * colour


def _signed(image, value):
  most = np.quantile(np.abs(value), 0.995)
  value = np.clip(value / (most if most > 0 else 1), -1, 1)
  strength = np.abs(value)[..., None]
  colour = matplotlib.colormaps['RdBu_r'](0.5 + 0.45 * np.sign(value))[..., :3]
  return (1 - strength) * (0.6 + 0.4 * _grey(image)) + strength * colour


_OVERLAYS = {'mask': _mask, 'heat': _heat, 'signed': _signed}


def _shares(value):
  most = value.max()
  return np.clip(value / (most if most > 0 else 1), 0, 1)


def _grey(image):
  return (image @ [0.299, 0.587, 0.114])[..., None]


@_styled
def heads(mean: np.ndarray, std: np.ndarray, uniform: float) -> Figure:
  """Draws each head's attention distance against its layer (ViT paper, figure 7 right).

  Args:
    mean: [L, M] pixels; std: over images.
    uniform: the distance under uniform attention, drawn as a dashed line.
  """
  L, M = mean.shape
  figure = Figure((3.4, 2.6), layout='constrained')
  ax = figure.subplots()
  dashes = dict(color='0.6', linewidth=0.7, linestyle=(0, (4, 3)), zorder=0)
  ax.axhline(uniform, label='Uniform attention', **dashes)
  colours = matplotlib.colormaps['viridis'](np.linspace(0, 0.9, M))
  for m in range(M):
    x = np.arange(L) + 0.25 * ((m + 0.5) / M - 0.5)  # bars beside one another
    style = dict(color=colours[m], markersize=2.5, elinewidth=0.5)
    ax.errorbar(x, mean[:, m], std[:, m], fmt='o', label=f'Head {m + 1}', **style)
  ax.set(xlabel='Network depth (layer)', ylabel='Mean attention distance (pixels)')
  ax.set_xlim(-0.5, L - 0.5)
  ax.set_ylim(0, 1.12 * max(uniform, (mean + std).max()))
  ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  shown = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
  if M > 8:  # a few, as in the paper
    few = ('Head 1', 'Head 2', 'Head 3', f'Head {M}', 'Uniform attention')
    shown = {name: shown[name] for name in few}
  figure.legend(shown.values(), shown.keys(), loc='outside right upper')
  return figure


@_styled
def tiles(similarity: np.ndarray, title: str) -> Figure:
  """Draws how similar positions are, a tile for each (ViT paper, figure 7 centre).

  Args:
    similarity: [h, w, h, w] in [-1, 1]. With more than 16 rows or columns, only every
      second, third, ... tile is drawn.
  """
  h, w = similarity.shape[:2]
  steps = [-(-n // 16) for n in (h, w)]
  rows, columns = (
    list(range((n - 1) % s // 2, n, s)) for n, s in zip((h, w), steps, strict=True)
  )
  side = 3.2 / max(len(rows), len(columns))
  figure = Figure(
    (side * len(columns) + 1, side * len(rows) + 0.6), layout='constrained'
  )
  ax = figure.subplots()
  chosen = [similarity[i, j] for i in rows for j in columns]
  drawn = _mosaic(ax, chosen, len(columns), vmin=-1, vmax=1, cmap='viridis')
  at = lambda numbers: (
    [k + 0.5 for k in range(len(numbers))],
    [n + 1 for n in numbers],
  )
  ax.set_xticks(*at(columns), size=7)
  places, names = at(rows)
  ax.set_yticks([y * h / w for y in places], names, size=7)
  ax.tick_params(length=0)
  ax.set(title=title, xlabel='Input patch column', ylabel='Input patch row')
  cax = ax.inset_axes((1.02, 0, 0.03, 1))
  bar = figure.colorbar(drawn, cax=cax, ticks=[-1, 0, 1])
  bar.set_label('Cosine similarity')
  bar.outline.set_visible(False)
  return figure


@_styled
def filters(shown: np.ndarray, title: str, across: int) -> Figure:
  """Draws filters [n, ph, pw, C] in [0, 1], C 1 or 3 (ViT paper, figure 7 left)."""
  n, ph, pw, C = shown.shape
  across = min(across, n)
  down = -(-n // across)
  side = 3.2 / max(across, 4)
  size = (side * across, side * ph / pw * down + 0.32)
  figure = Figure(size, layout='constrained')
  ax = figure.subplots()
  _mosaic(ax, shown if C == 3 else shown[..., 0], across, cmap='gray', vmin=0, vmax=1)
  ax.set(xticks=[], yticks=[], title=title)
  return figure


def _mosaic(ax, images: Sequence[np.ndarray], across: int, **options):
  """Draws images row by row in cells of width 1; returns the last as matplotlib has it."""
  h, w = images[0].shape[:2]
  gap, down = 0.035, -(-len(images) // across)
  for i, image in enumerate(images):
    x, y = i % across, i // across * h / w
    box = (x + gap, x + 1 - gap, y + h / w - gap, y + gap)
    drawn = ax.imshow(image, extent=box, **options)
  ax.set(xlim=(0, across), ylim=(down * h / w, 0), aspect='equal')
  ax.spines[:].set_visible(False)
  return drawn


@_styled
def before_after(rows: dict[str, np.ndarray], titles: Sequence[str]) -> Figure:
  """Draws rows of k images [k, h, w]; each of the k columns has one colour range.

  Args:
    rows: {label: images}; rows may differ in h and w.
    titles: of the k columns.
  """
  k = len(titles)
  side = _WIDTH / k - 0.1
  figure = Figure((_WIDTH, len(rows) * (side + 0.08) + 0.1))
  axes = figure.subplots(len(rows), k, squeeze=False)
  figure.subplots_adjust(0, 0, 1, 1, 0.08, 0.08)
  for i, (label, images) in enumerate(rows.items()):
    for j, image in enumerate(images):
      ax = axes[i, j]
      each = [np.abs(x[j]).max() for x in rows.values()]
      most = max(each) or 1
      ax.imshow(image, vmin=-most, vmax=most, cmap='viridis' if j == 0 else 'RdBu_r')
      ax.set(xticks=[], yticks=[])
      ax.spines[:].set_visible(False)
      if i == 0:
        ax.set_title(titles[j], size=8, pad=3)
      if j == 0:
        ax.set_ylabel(label, size=8, labelpad=3)
  return figure


@_styled
def panels(shown: Sequence[Panel]) -> Figure:
  """Draws points against a logarithmic axis, panels side by side."""
  width = _WIDTH if len(shown) > 1 else 3.4
  figure = Figure((width, 2.5 if len(shown) < 3 else 2.2), layout='constrained')
  styles: dict[str, tuple] = {}
  for ax, panel in zip(
    figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True
  ):
    for series in panel.series:
      number = len(styles)
      style = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
      colour, marker = styles.setdefault(series.label, style)
      line = '-' if series.joined else 'none'
      fmt = dict(color=colour, marker=marker, linestyle=line, markeredgewidth=0)
      ax.errorbar(
        series.x, series.y, series.std, label=series.label, elinewidth=0.7, **fmt
      )
      for x, y, name in zip(series.x, series.y, series.names or (), strict=False):
        near = dict(xytext=(3, 3), textcoords='offset points', size=6, color=colour)
        ax.annotate(name, (x, y), **near)
    ax.set_xscale('log')
    ax.set(title=panel.title, ylabel=panel.ylabel)
    if panel.ticks:
      ax.set_xticks(list(panel.ticks), panel.ticks.values(), size=7)
      ax.minorticks_off()
    else:
      ax.xaxis.set_minor_formatter(NullFormatter())
    ax.margins(0.09)
    _show_two_decades(ax, [x for series in panel.series for x in series.x])
    if '%' in panel.ylabel and ax.get_ylim()[1] > 100:
      ax.set_ylim(top=100.3)
    ax.grid(color='0.92', linewidth=0.5)
    ax.set_axisbelow(True)
  labels = [panel.xlabel for panel in shown]
  if len(set(labels)) == 1:
    figure.supxlabel(labels[0], size=9)
  handles = {}
  for ax, label in zip(figure.axes, labels, strict=True):
    ax.set_xlabel('' if len(set(labels)) == 1 else label)
    handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
  most = 5 if len(shown) > 1 else 3
  place = dict(loc='outside upper center', ncols=min(most, len(handles)))
  figure.legend(handles.values(), handles.keys(), columnspacing=1.2, **place)
  return figure


@_styled
def compared(names: Sequence[str], panels: dict[str, Sequence]) -> Figure:
  """Draws values below one another, a panel for each kind.

  Args:
    names: of the rows, from the top.
    panels: label of the axis -> for each row (value, standard deviation), or None.
  """
  figure = Figure((_WIDTH, 0.7 + 0.21 * len(names)), layout='constrained')
  axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
  for i, (ax, (label, values)) in enumerate(zip(axes, panels.items(), strict=True)):
    for y, value in enumerate(values):
      if value is not None:
        fmt = dict(color=COLOURS[i % len(COLOURS)], marker='o', markeredgewidth=0)
        ax.errorbar(value[0], y, xerr=value[1] or None, elinewidth=0.8, **fmt)
    ax.set(xlabel=label, yticks=range(len(names)))
    ax.set_yticklabels(names)
    ax.margins(x=0.08)
    ax.grid(color='0.92', linewidth=0.5)
    ax.set_axisbelow(True)
  axes[0].set_ylim(len(names) - 0.5, -0.5)
  return figure


def _show_two_decades(ax, x: Sequence[float]) -> None:
  """Widens a logarithmic axis that would have fewer than two labels."""
  low, high = (np.log10(f(x)) for f in (min, max))
  if np.floor(high) - np.ceil(low) < 1:
    ax.set_xlim(10.0 ** np.floor(low) * 0.8, 10.0 ** np.ceil(high + 1e-9) * 1.25)


@_styled
def bars(
  groups: Sequence[str], values: dict[str, Sequence], stds: dict[str, Sequence]
) -> Figure:
  """Draws a panel of bars for each group (ViT paper, figure 2).

  Args:
    groups: titles of the panels.
    values: {label: per cent in each group}, nan where there is none.
    stds: {label: standard deviations}, nan where there is none.
  """
  figure = Figure((_WIDTH, 2.3), layout='constrained')
  axes = figure.subplots(1, len(groups), squeeze=False)[0]
  for g, (ax, group) in enumerate(zip(axes, groups, strict=True)):
    heights = [series[g] for series in values.values()]
    for i, label in enumerate(values):
      if np.isnan(heights[i]):
        continue
      error = None if np.isnan(stds[label][g]) else stds[label][g]
      colour = COLOURS[i % len(COLOURS)]
      ax.bar(
        i, heights[i], 0.82, yerr=error, color=colour, error_kw={'elinewidth': 0.6}
      )
      top = heights[i] + (error or 0)
      ax.annotate(f'{heights[i]:.1f}', (i, top), (0, 1), textcoords='offset points',
                  ha='center', va='bottom', size=6)  # fmt: skip
    known = [v for v in heights if not np.isnan(v)]
    low = 5 * (min(known, default=0) // 5)
    ax.set_ylim(max(0, low - 10), max(known, default=100) + 2)
    ax.set(title=group, xticks=[])
    ax.set_xlim(-0.6, len(values) - 0.4)
  axes[0].set_ylabel('Accuracy (%)')
  block = [Patch(color=COLOURS[i % len(COLOURS)]) for i in range(len(values))]
  place = dict(loc='outside lower center', ncols=min(len(values), 4), handlelength=1)
  figure.legend(block, list(values), **place)
  return figure
