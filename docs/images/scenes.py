"""Makes the data of the README's picture: handwritten digits hidden in photographs.

  python docs/images/scenes.py FOLDER

writes FOLDER/scenes.npz, 56 x 56 pixels, for `--config=folder:data=arrays:...`, and
FOLDER/0.png, ... to look at, of digits and parts of photographs that it does not hold.
Both come with scikit-learn: the photographs are china.jpg by danielbuechele and flower.jpg
by vultilion (CC BY 2.0), the digits those of configs/digits.py. docs/guides/explain.md
has the other commands.
"""

import pathlib
import sys

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

SIZE = 56
TRAIN, VAL, SHOWN = 16_000, 1_000, 12


def scene(rng, photographs, digit: np.ndarray, left: bool) -> np.ndarray:
  """Returns a part of a photograph with a digit written on it.

  Args:
    rng: draws the place, size and colour.
    photographs: uint8 [H, W, 3].
    digit: float [8, 8] in [0, 1], how much ink there is.
    left: whether it is a part of the left four fifths of a photograph, or of the rest.
  """
  photograph = photographs[rng.integers(len(photographs))]
  H, W, _ = photograph.shape
  cut = W * 4 // 5
  photograph = photograph[:, :cut] if left else photograph[:, cut:]
  H, W, _ = photograph.shape
  side = rng.integers(SIZE, min(2 * SIZE, W) + 1)
  y, x = rng.integers(H - side + 1), rng.integers(W - side + 1)
  ground = Image.fromarray(photograph[y : y + side, x : x + side])
  ground = np.asarray(ground.resize((SIZE, SIZE), Image.Resampling.BOX), np.float32)

  height = rng.integers(22, 31)
  ink = Image.fromarray((digit * 255).astype(np.uint8))
  ink = np.asarray(ink.resize((height, height), Image.Resampling.BICUBIC), np.float32)
  ink = np.clip(ink / 255 * 1.4, 0, 1)[..., None]
  y, x = rng.integers(SIZE - height + 1, size=2)
  under = ground[y : y + height, x : x + height]
  # A light pen on dark ground, a dark pen on bright ground.
  pen = rng.uniform(200, 255, 3) if under.mean() < 128 else rng.uniform(0, 55, 3)
  ground[y : y + height, x : x + height] = under * (1 - ink) + pen * ink
  return ground.round().astype(np.uint8)


def main(folder: pathlib.Path):
  rng = np.random.default_rng(0)
  photographs = load_sample_images().images
  digits = load_digits()
  ink, labels = digits.images / 16, digits.target
  unseen = np.arange(len(ink)) % 5 == 0  # configs/digits.py's test images
  parts = {}
  for split, count in (('train', TRAIN), ('val', VAL)):
    chosen = rng.choice(np.flatnonzero(unseen == (split == 'val')), count)
    images = [scene(rng, photographs, ink[i], split == 'train') for i in chosen]
    parts |= {f'{split}_images': np.stack(images), f'{split}_labels': labels[chosen]}
  folder.mkdir(parents=True, exist_ok=True)
  np.savez(folder / 'scenes.npz', **parts)
  for i in range(SHOWN):
    Image.fromarray(parts['val_images'][i]).save(folder / f'{i}.png')


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
