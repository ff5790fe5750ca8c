"""The common style of figures: their fonts, markers, and how they are saved."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

WIDTH = 5.5
STYLE = {
  # Both fonts come with matplotlib.
  'font.family': ['STIXGeneral', 'DejaVu Serif'],
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
  # TrueType fonts, so that text can be searched and edited.
  'pdf.fonttype': 42,
  # A fixed salt, so that ids within a figure do not change from run to run.
  'svg.hashsalt': 'vit_jax',
}
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X')


def apply_style(draw: Callable) -> Callable:
  """Decorates a function that draws, so that it draws in this style."""

  @functools.wraps(draw)
  def draw_styled(*args, **kwargs):
    with matplotlib.rc_context(STYLE):
      return draw(*args, **kwargs)

  return draw_styled


@apply_style
def save(figure: Figure, path: str | Path) -> None:
  """Writes a figure in the format of the suffix, .png, .pdf or .svg.

  The file contains no date, so that the same numbers give the same file.
  """
  empty = {'.png': {'Software': None}, '.pdf': {'CreationDate': None}}
  metadata = empty.get(Path(path).suffix, {'Date': None})
  with warnings.catch_warnings():
    # Do not warn if class names need a font that is not installed.
    warnings.filterwarnings('ignore', message='Glyph .* missing from')
    figure.savefig(path, bbox_inches='tight', pad_inches=0.03, metadata=metadata)
