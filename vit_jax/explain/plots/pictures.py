"""Draws images, maps over images, filters and tiles."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from vit_jax import resample
from vit_jax.explain.plots import style

# Maps are clipped at this quantile, because a few patches may have many times the weight of
# all others.
TOP = 0.99


@style.apply_style
def maps(
  images: np.ndarray,
  values: np.ndarray,
  title: str,
  captions: Sequence[str] | None = None,
  overlay: str = 'heat',
) -> Figure:
  """Draws images beside their maps (ViT paper, figures 6 and 14).

  Args:
    images: [B, H, W, C] in [0, 1], C 1 or 3.
    values: [B, h, w], resized to the images' size.
    captions: one text above each image.
    overlay: 'heat': colours from the 1st to the 99th percentile of each map.
      'mask': the image times the map, as in the paper, with factor 1 from the 99th
      percentile on.
      'signed': red where the map is positive and blue where it is negative.
  """
  B, H, W, _ = images.shape
  across = 1 if B <= 3 else 2 if B <= 8 else 4
  down = -(-B // across)
  near, far, above = 0.05, 0.14, 0.16 if captions else 0.0
  side = min(1.35, (style.WIDTH + far) / across / 2 - (near + far) / 2)
  pair, row = 2 * side + near + far, side * H / W + above + near
  figure = Figure((across * pair - far, down * row + 0.25))
  width, height = figure.get_size_inches()
  # Adds axes at (x, y), in inches from the upper left corner.
  place = lambda x, y, w, h: figure.add_axes(
    (x / width, 1 - (y + h) / height, w / width, h / height)
  )
  for i in range(B):
    x, y = i % across * pair, i // across * row + above
    shown = _enlarge(images[i], _scale_map(values[i], overlay))
    for k, image in enumerate((shown[0], _OVERLAYS[overlay](*shown))):
      ax = place(x + k * (side + near), y, side, side * H / W)
      ax.imshow(image)
      ax.set_axis_off()
      if i < across:
        at = (0.5, 1 + (above + 0.03) / (side * H / W))
        ax.text(*at, ('Input', title)[k], **_place_above(ax), size=9)
      if captions and k == 0:
        # Maximum number of characters of 7 points that fit.
        most = int(2 * side / 0.048)
        text = captions[i]
        text = text if len(text) <= most else text[: most - 1] + '…'
        ax.text(1 + near / 2 / side, 1.02, text, **_place_above(ax), size=7)
  # The colour key, below a map.
  ax = place(side + near, down * row + 0.03, side, 0.07)
  ramp = np.linspace(-1 if overlay == 'signed' else 0, 1, 256)[None]
  ax.imshow(_OVERLAYS[overlay](np.full((1, 256, 3), 0.7), ramp), aspect='auto')
  ax.set_axis_off()
  for x, end in enumerate(
    ('against', 'for') if overlay == 'signed' else ('low', 'high')
  ):
    ax.text(
      x, -0.3, end, transform=ax.transAxes, ha=('left', 'right')[x], va='top', size=7
    )
  return figure


def _scale_map(value: np.ndarray, overlay: str) -> np.ndarray:
  """Scales a map to [0, 1], or signed to [-1, 1], so that most patches can be told apart."""
  low, high = np.quantile(value, (1 - TOP, TOP))
  if overlay == 'signed':
    low, high = 0, np.quantile(np.abs(value), TOP)
  elif overlay == 'mask':
    low = 0
  if high <= low:
    # Use a wider range, because few patches differ from 0 or all are alike.
    low, high = min(0, value.min()), np.abs(value).max()
  least = -1 if overlay == 'signed' else 0
  return np.clip((value - low) / (high - low if high > low else 1), least, 1)


def heat(image: np.ndarray, value: np.ndarray) -> np.ndarray:
  """Draws a map in colours over an image [H, W, C] in [0, 1], with sides of 128 px or more."""
  return _heat(*_enlarge(image, _scale_map(value, 'heat')))


def _place_above(ax) -> dict:
  return dict(transform=ax.transAxes, ha='center', va='bottom')


def _enlarge(image: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Enlarges an image and its map to one size of 128 px or more; the image gets 3 channels."""
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
  return image * value[..., None]


def _heat(image, value):
  return 0.4 * _grey(image) + 0.6 * matplotlib.colormaps['inferno'](value)[..., :3]


def _red_and_blue(image, value):
  strength = np.abs(value)[..., None]
  colour = matplotlib.colormaps['RdBu_r'](0.5 + 0.45 * np.sign(value))[..., :3]
  return (1 - strength) * (0.6 + 0.4 * _grey(image)) + strength * colour


_OVERLAYS = {'mask': _mask, 'heat': _heat, 'signed': _red_and_blue}


def _grey(image):
  return (image @ [0.299, 0.587, 0.114])[..., None]


@style.apply_style
def tiles(similarity: np.ndarray, title: str) -> Figure:
  """Draws how similar positions are, as one tile per position (ViT paper, figure 7 centre).

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
  size = (side * len(columns) + 1, side * len(rows) + 0.6)
  figure = Figure(size, layout='constrained')
  ax = figure.subplots()
  chosen = [similarity[i, j] for i in rows for j in columns]
  drawn = _mosaic(ax, chosen, len(columns), vmin=-1, vmax=1, cmap='viridis')
  ax.set_xticks(np.arange(len(columns)) + 0.5, np.add(columns, 1), size=7)
  ax.set_yticks((np.arange(len(rows)) + 0.5) * h / w, np.add(rows, 1), size=7)
  ax.tick_params(length=0)
  ax.set(title=title, xlabel='Input patch column', ylabel='Input patch row')
  cax = ax.inset_axes((1.02, 0, 0.03, 1))
  bar = figure.colorbar(drawn, cax=cax, ticks=[-1, 0, 1])
  bar.set_label('Cosine similarity')
  bar.outline.set_visible(False)
  return figure


@style.apply_style
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
  """Draws images row by row in cells of width 1; returns matplotlib's last image."""
  h, w = images[0].shape[:2]
  gap, down = 0.035, -(-len(images) // across)
  for i, image in enumerate(images):
    x, y = i % across, i // across * h / w
    box = (x + gap, x + 1 - gap, y + h / w - gap, y + gap)
    drawn = ax.imshow(image, extent=box, **options)
  ax.set(xlim=(0, across), ylim=(down * h / w, 0), aspect='equal')
  ax.spines[:].set_visible(False)
  return drawn
