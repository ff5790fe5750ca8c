"""Images, maps over images, filters and tiles."""

from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from vit_jax import resample
from vit_jax.explain.plots import style


@style.styled
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
  side = min(1.35, (style.WIDTH + far) / across / 2 - (near + far) / 2)
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


@style.styled
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


@style.styled
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
