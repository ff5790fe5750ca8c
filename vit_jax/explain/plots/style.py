"""The common style of figures: fonts, colours, and how they are saved."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

WIDTH = 5.5
STYLE = {
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
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X')


def apply_style(draw: Callable) -> Callable:
  """Returns `draw` with the style of these figures."""

  @functools.wraps(draw)
  def draw_styled(*args, **kwargs):
    with matplotlib.rc_context(STYLE):
      return draw(*args, **kwargs)

  return draw_styled


@apply_style
def save(figure: Figure, path: str | Path) -> None:
  """Writes a figure; the format is that of the suffix, .png, .pdf or .svg.

  The file has no date in it, so that the same numbers give the same file.
  """
  empty = {'.png': {'Software': None}, '.pdf': {'CreationDate': None}}
  metadata = empty.get(Path(path).suffix, {'Date': None})
  with warnings.catch_warnings():  # class names may need a font that is not here
    warnings.filterwarnings('ignore', message='Glyph .* missing from')
    figure.savefig(path, bbox_inches='tight', pad_inches=0.03, metadata=metadata)
