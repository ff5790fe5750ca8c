"""Images with labelled boxes drawn on them, by Pillow."""

from collections.abc import Sequence

import numpy as np

from vit_jax.explain.colours import COLOURS

# Bright colours only: yellow replaces grey, which a dark image would hide.
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
    corners: [n, 4], left, top, right, bottom in pixels; clipped to the image.
    labels: n texts.
    numbers: n whole numbers; boxes with the same number, of one class, have one colour.
  """
  from PIL import Image, ImageColor, ImageDraw, ImageFont

  sides = image.shape[:2]
  times = max(1, min(-(-_LEAST // min(sides)), _MOST // max(sides)))
  large = image.repeat(times, 0).repeat(times, 1).repeat(3 // image.shape[2], 2)
  drawn = Image.fromarray(large)
  pen = ImageDraw.Draw(drawn)
  height, width = large.shape[:2]
  shorter = min(height, width)
  line, font = max(2, shorter // 200), ImageFont.load_default(max(12, shorter / 28))
  low, high = np.split(np.asarray(corners, np.float64).reshape(-1, 4) * times, 2, 1)
  low = np.floor(low)
  high = np.maximum(np.ceil(high) - 1, low)  # the last pixels of the boxes
  boxes = np.concatenate([low, high], 1).clip(0, np.tile([width - 1, height - 1], 2))
  boxes = [tuple(map(int, box)) for box in boxes]
  colours = [ImageColor.getrgb(_COLOURS[k % len(_COLOURS)]) for k in numbers]
  for box, colour in reversed([*zip(boxes, colours, strict=True)]):  # the first on top
    pen.rectangle(box, outline=colour, width=line)
  taken: list[tuple] = []
  for box, colour, text in zip(boxes, colours, labels, strict=True):
    left, top, right, bottom = pen.textbbox((0, 0), text, font)
    w, h = right - left + 2 * line, bottom - top + 2 * line
    x = max(0, min(box[0], width - 1 - w))
    # Above the box, within it or below: the first place that is free.
    rows = [
      max(0, min(y, height - 1 - h)) for y in (box[1] - h, box[1], box[3] - h, box[3])
    ]
    places = [(x, y, x + w, y + h) for y in rows]
    place = next((p for p in places if not _overlaps(p, taken)), places[0])
    taken.append(place)
    pen.rectangle(place, fill=colour)
    # The luminance of ITU-R BT.601 decides between black and white.
    dark = np.dot(colour, [0.299, 0.587, 0.114]) < 140
    start = x + line - left, place[1] + line - top
    pen.text(start, text, 'white' if dark else 'black', font)
  return np.asarray(drawn)


def _overlaps(a: tuple, others: list[tuple]) -> bool:
  disjoint = lambda b: b[0] >= a[2] or a[0] >= b[2] or b[1] >= a[3] or a[1] >= b[3]
  return not all(map(disjoint, others))
