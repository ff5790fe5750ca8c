"""Images with labelled boxes drawn on them, by Pillow."""

from collections.abc import Sequence

import numpy as np

from vit_jax.explain.colours import COLOURS

# Bright ones: yellow in place of grey, which would be lost in a dark image.
_COLOURS = (*COLOURS[:-1], '#F0E442')
# Pixels of the shorter side; a smaller image is enlarged by a whole number, as long as
# its longer side stays below _MOST.
_LEAST, _MOST = 400, 4000


def draw(
  image: np.ndarray,
  corners: np.ndarray,
  labels: Sequence[str],
  numbers: Sequence[int],
) -> np.ndarray:
  """Returns an image with boxes and their labels, uint8 [H', W', 3].

  Its size is that of the image, or for small ones a multiple of it, so that labels are
  legible. A label that would overlap an earlier one moves within or below its box; where
  no place is free, it is drawn over it.

  Args:
    image: uint8 [H, W, C], C 1 or 3.
    corners: [n, 4], left, top, right, bottom in pixels of the image, to which they are
      clipped.
    labels: n texts.
    numbers: n whole numbers; boxes with the same one, of one class, have one colour.
  """
  from PIL import Image, ImageColor, ImageDraw, ImageFont

  sides = image.shape[:2]
  times = max(1, min(-(-_LEAST // min(sides)), _MOST // max(sides)))
  large = image.repeat(times, 0).repeat(times, 1).repeat(3 // image.shape[2], 2)
  drawn = Image.fromarray(large)
  pen = ImageDraw.Draw(drawn)
  shorter = min(large.shape[:2])
  line, font = max(2, shorter // 200), ImageFont.load_default(max(12, shorter / 28))
  boxes = [_inside(box, large.shape[:2]) for box in np.asarray(corners) * times]
  colours = [ImageColor.getrgb(_COLOURS[k % len(_COLOURS)]) for k in numbers]
  for box, colour in reversed([*zip(boxes, colours, strict=True)]):  # the first on top
    pen.rectangle(box, outline=colour, width=line)
  taken: list[tuple] = []
  for box, colour, text in zip(boxes, colours, labels, strict=True):
    left, top, right, bottom = pen.textbbox((0, 0), text, font)
    size = right - left + 2 * line, bottom - top + 2 * line
    x, y = place = _place(box, size, large.shape[:2], taken)
    taken.append((*place, x + size[0], y + size[1]))
    pen.rectangle(taken[-1], fill=colour)
    # The luminance of ITU-R BT.601 decides between black and white.
    dark = np.dot(colour, [0.299, 0.587, 0.114]) < 140
    start = x + line - left, y + line - top
    pen.text(start, text, 'white' if dark else 'black', font)
  return np.asarray(drawn)


def _inside(box, size: tuple[int, int]) -> tuple[int, int, int, int]:
  """Returns a box in whole pixels, the last ones included, with what is in the image."""
  most = np.tile(size[::-1], 2) - 1
  low, high = np.floor(box[:2]), np.maximum(np.ceil(box[2:]) - 1, np.floor(box[:2]))
  return tuple(int(x) for x in np.clip([*low, *high], 0, most))


def _place(box, size, image_size, taken) -> tuple[int, int]:
  """Returns left and top of a label: above its box, within it or below, the first free."""
  left, top, _, bottom = box
  width, height = size
  most_x, most_y = image_size[1] - 1 - width, image_size[0] - 1 - height
  fit = lambda x, y: (max(0, min(x, most_x)), max(0, min(y, most_y)))
  tried = [fit(left, y) for y in (top - height, top, bottom - height, bottom)]

  def free(at):
    x, y = at
    apart = lambda a: a[0] >= x + width or x >= a[2] or a[1] >= y + height or y >= a[3]
    return all(map(apart, taken))

  return next(filter(free, tried), tried[0])
