"""What a VTAB task makes of an example of its data set: derived labels, white masks.

By the definitions of the benchmark's own code (Zhai et al. 2019, arXiv 1910.04867;
google-research/task_adaptation). Examples are dicts of all features, as TFDS reads them.
"""

import io
from collections.abc import Callable, Sequence

import numpy as np

# The bounds of classes: class i is above bounds[i] and up to bounds[i + 1], inclusive.
CLEVR_BOUNDS = (0, 8, 8.5, 9, 9.5, 10, 100)
KITTI_BOUNDS = (-100, 8, 20, 999)  # in metres; one more class is beyond the last

# The first of KITTI's types of objects: cars, vans and trucks.
_VEHICLES = 3
_NO_VEHICLE = 1000.0


def feature(name: str = 'label') -> Callable[[dict], int]:
  """Returns the label that is a feature as it stands."""
  return lambda example: int(example[name])


def binned(name: str, values: int, bins: int) -> Callable[[dict], int]:
  """Returns the label that is a feature of `values` values in `bins` equal bins.

  Where `bins` does not divide `values`, floor(value / (values / bins)).
  """
  return lambda example: int(example[name]) * bins // values


def clevr_count(example: dict) -> int:
  """Returns the number of objects, 3 to 10, as a class from 0 on."""
  return len(example['objects']['size']) - 3


def clevr_distance(example: dict) -> int:
  """Returns the class of the distance from the camera to the closest object."""
  depths = np.reshape(example['objects']['pixel_coords'], [-1, 3])[:, 2]
  return _bin(depths.min(initial=np.inf), CLEVR_BOUNDS)


def kitti_distance(example: dict) -> int:
  """Returns the class of the distance to the closest vehicle; the last: there is none."""
  objects = example['objects']
  depths = np.reshape(objects['location'], [-1, 3])[:, 2]
  depths = depths[np.reshape(objects['type'], [-1]) < _VEHICLES]
  return _bin(depths.min(initial=_NO_VEHICLE), KITTI_BOUNDS)


def _bin(value: float, bounds: Sequence[float]) -> int:
  # A value on a bound belongs to the class below it.
  return int(np.searchsorted(bounds, value, side='left')) - 1


def white(data: bytes) -> bytes:
  """Returns the PNG of a mask of zeros and ones with 255 for one."""
  from PIL import Image

  out = io.BytesIO()
  with Image.open(io.BytesIO(data)) as image:
    image.point(lambda value: 255 * min(value, 1)).save(out, 'PNG', compress_level=1)
  return out.getvalue()
