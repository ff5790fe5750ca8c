"""Draws labelled boxes and masks on images, with Pillow."""

import colorsys
from collections.abc import Sequence

import numpy as np

from vit_jax.explain.colours import COLOURS

# Yellow replaces grey, which would not show on a dark image.
_COLOURS = (*COLOURS[:-1], '#F0E442')
# Minimum length of the shorter side, in pixels. A smaller image is enlarged by an integer
# factor.
_LEAST = 400


def palette(number: int) -> np.ndarray:
  """Returns a colour for each class, uint8 [number, 3]."""
  # Steps by the golden ratio keep hues far apart, however many there are.
  hues = [colorsys.hsv_to_rgb(0.618 * k % 1, 0.75, 0.95) for k in range(number)]
  return np.uint8(255 * np.array(hues))


def draw(
  image: np.ndarray,
  corners: np.ndarray,
  labels: Sequence[str],
  numbers: Sequence[int],
  text: float = 1 / 28,
  masks: Sequence[np.ndarray] = (),
):
  """Draws boxes and labels on an image, with the first one on top; returns a PIL image.

  Args:
    image: uint8 [H, W, C], C 1 or 3.
    corners: [n, 4], left, top, right, bottom in pixels.
    labels: n texts.
    numbers: n whole numbers, such as classes. Equal numbers get the same colour.
    text: height of the labels, as a fraction of the shorter side.
    masks: n masks bool [H, W], or none. They lie below the boxes, half transparent with
      an opaque edge.
  """
  from PIL import Image, ImageDraw, ImageFont

  times = -(-_LEAST // min(_LEAST, *image.shape[:2]))
  large = image.repeat(times, 0).repeat(times, 1).repeat(3 // image.shape[2], 2)
  for mask, number in reversed([*zip(masks, numbers, strict=False)]):
    _paint(large, mask.repeat(times, 0).repeat(times, 1), _colour(number))
  out = Image.fromarray(large)
  pen, side = ImageDraw.Draw(out), min(out.size)
  line, font = max(2, side // 200), ImageFont.load_default(max(12, side * text))
  corners = np.clip(np.reshape(corners, (-1, 4)) * times, 0, np.tile(out.size, 2))
  objects = [*zip(corners.tolist(), labels, numbers, strict=True)]
  for (left, top, right, bottom), _, number in reversed(objects):
    box = left, top, max(left, right - 1), max(top, bottom - 1)
    pen.rectangle(box, outline=_colour(number), width=line)
  # No box crosses a label. A label stands above its box, if there is room.
  for (left, top, _, _), label, number in reversed(objects):
    place = left, max(top, font.size + 2 * line)
    pen.rectangle(pen.textbbox(place, label, font, 'lb'), fill=_colour(number))
    pen.text(place, label, 'black', font, 'lb')
  return out


def _colour(number: int) -> str:
  return _COLOURS[number % len(_COLOURS)]


def _paint(image: np.ndarray, mask: np.ndarray, colour: str) -> None:
  """Blends a mask's pixels with a colour, in place. Its edge gets the pure colour."""
  inner, width = mask.copy(), max(1, min(mask.shape) // 400)
  for axis in (0, 1):
    for step in (-width, width):
      inner &= np.roll(mask, step, axis)
  rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
  image[mask] = (image[mask] + rgb) // 2
  image[mask & ~inner] = rgb
