"""Draws the picture of docs/guides/detection.md: what two runs see on canvases of digits.

  python docs/images/canvases.py DETECTOR SEGMENTER canvases.png

DETECTOR is a run of configs/detr_digits.py, SEGMENTER one of
configs/vitdet_digits.py:head=segment. A column for each of the first canvases of the test
split: the detector's boxes that score more than 0.5, the segmenter's classes of pixels, and
those that are there, each digit in a colour of its own.
"""

import sys

import numpy as np
from PIL import Image, ImageColor, ImageDraw

import vit_jax
from vit_jax.data import sources
from vit_jax.detection import inference
from vit_jax.explain.colours import COLOURS

SHOWN, SIDE, GAP = 6, 192, 8
PALETTE = [
  *COLOURS[:-1],
  '#F0E442',
  '#999999',
  '#882255',
  '#FFFFFF',
]  # Ten colours, one for each digit.


def painted(segments: np.ndarray) -> np.ndarray:
  """Returns classes of pixels [H, W], 0 the background, as colours, uint8 [H, W, 3]."""
  colours = [(0, 0, 0), *map(ImageColor.getrgb, PALETTE)]
  return np.array(colours, np.uint8)[segments]


def outlined(image: np.ndarray, corners: np.ndarray, digits: np.ndarray) -> np.ndarray:
  """Returns a canvas [H, W, 1], enlarged, with boxes [n, 4] in the digits' colours."""
  times = SIDE // len(image)
  drawn = Image.fromarray(image[..., 0]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
  drawn = drawn.convert('RGB')
  pen = ImageDraw.Draw(drawn)
  for box, digit in zip(corners, digits, strict=True):
    pen.rectangle(list(box * times), outline=PALETTE[digit], width=3)
  return np.asarray(drawn)


def row(pictures: list[np.ndarray]) -> np.ndarray:
  """Returns pictures [h, w, 3], whose side is SIDE or divides it, beside each other."""
  large = [x.repeat(SIDE // len(x), 0).repeat(SIDE // len(x), 1) for x in pictures]
  padded = [np.pad(x, [(0, GAP), (0, GAP), (0, 0)], constant_values=255) for x in large]
  return np.concatenate(padded, axis=1)


def main(detector: str, segmenter: str, target: str):
  source = sources.build('digits_canvas', f'test[:{SHOWN}]', segments=True)
  examples = source.read(np.arange(SHOWN))
  images = [example['image'] for example in examples]
  loaded = vit_jax.load(detector)
  detections = inference.detect_images(loaded, images)
  drawn = []
  for i, image in enumerate(images):
    certain = detections.scores[i] > 0.5
    drawn.append(
      outlined(image, detections.boxes[i][certain], detections.labels[i][certain])
    )
  loaded = vit_jax.load(segmenter)
  logits, _ = loaded.model.apply(
    loaded.variables, vit_jax.preprocess(images, pp='value_range(-1, 1)')
  )
  rows = [drawn, map(painted, np.asarray(logits).argmax(-1))]
  rows.append(painted(example['segments']) for example in examples)
  picture = np.concatenate([row(list(pictures)) for pictures in rows])
  Image.fromarray(picture[:-GAP, :-GAP]).quantize(64).save(target, optimize=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
