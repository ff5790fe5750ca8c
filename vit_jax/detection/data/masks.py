"""Images with a class for every pixel, in two folders on disk."""

import io
import os
import types
from collections import Counter
from pathlib import Path

import numpy as np

from vit_jax import files
from vit_jax.data import image_file
from vit_jax.data.features import Feature, ImageFeature
from vit_jax.data.sources import folder
from vit_jax.detection.tasks.segment import IGNORED
from vit_jax.errors import BadImage, UserError

_NAMES = 'classes.txt'


class Masks(folder.Folder):
  """The source `masks:ROOT`, with ROOT/SPLIT/images/**/NAME.jpg and masks/**/NAME.png.

  ROOT/images and ROOT/masks without splits are one split, 'train'. Names of splits and the
  order of images are as in `folder:`.

  A mask is a PNG with 8 bits per pixel, gray or with a palette. Its pixels are class
  numbers; 255 marks a pixel that does not count. The mask has the size of its image, after
  the image is rotated upright; otherwise the image is a bad image.

  Line k of ROOT/classes.txt, from 0, is the name of class k. Without that file,
  config.model.num_classes says how many classes there are.

  Args:
    target: the path of the folder ROOT.
    split: a split expression, see `splits`.
  """

  SCHEME, BELOW, RECIPE = 'masks', 'images and masks', 'linear_seg:data=masks:ROOT'
  features = types.MappingProxyType(
    {'image': ImageFeature(), 'segments': Feature((None, None), 'uint8', located=True)}
  )

  def _annotate(self, index: int) -> dict:
    mask = _mask_path(self._paths[index].replace('images', 'masks', 1))
    return {'segments': self._segments(os.path.join(self._root, mask))}

  def _segments(self, path: str) -> np.ndarray:
    """Reads a mask, uint8 [H, W]; raises UserError for a number that is not a class."""
    from PIL import Image, UnidentifiedImageError

    data = image_file.read(path)
    try:
      with Image.open(io.BytesIO(data)) as image:
        mode, segments = image.mode, np.asarray(image)
    except UnidentifiedImageError:
      raise BadImage('its mask is not an image of a known type') from None
    except Exception as error:  # Pillow raises errors of many types for broken files.
      raise BadImage(f'its mask: {error}') from None
    if mode not in ('1', 'L', 'P'):
      raise BadImage(f'its mask has the mode {mode}, expected 8 bits per pixel')
    segments = segments.astype(np.uint8)
    if self.num_classes is not None:
      labels = segments[segments != IGNORED]
      if (most := labels.max(initial=0)) >= self.num_classes:
        raise UserError(
          f'{path} has the class {most}, but {_NAMES} names {self.num_classes}, counted from 0.'
        )
    return segments

  def _set_classes(self, directories: dict[str, str]) -> None:
    path = Path(self._root) / _NAMES
    if path.is_file():
      with files.reading(path):
        names = path.read_text(encoding='utf-8').rstrip().splitlines()
      self.class_names = [name.strip() for name in names]
      self.num_classes = len(names)

  def _scan(self, directory: str, left_out: Counter, misplaced: Counter) -> list:
    """Lists the images of a split as (path below the root, 0), see `Folder`."""
    del misplaced
    places = [os.path.join(directory, name) for name in ('images', 'masks')]
    if missing := [place for place in places if not os.path.isdir(place)]:
      raise UserError(f'{self.name}: no such folder: {missing[0]!r}.')
    (images, others), (masks, _) = map(folder.images_below, places)
    left_out.update(others)
    if missing := sorted({*map(_mask_path, images)} - {*masks}):
      raise UserError(
        f'{self.name}: {len(missing):,} of {len(images):,} images have no mask; the first '
        f'is {os.path.join(places[1], missing[0])!r}.'
      )
    if not images:
      raise UserError(f'{self.name}: no image in {places[0]!r}.')
    prefix = os.path.relpath(directory, self._root).removeprefix('.')
    return folder.sort_by_hash((os.path.join(prefix, 'images', x), 0) for x in images)


def _mask_path(image: str) -> str:
  return f'{os.path.splitext(image)[0]}.png'
