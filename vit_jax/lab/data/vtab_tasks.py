"""The 19 tasks of VTAB-1k (Zhai et al. 2019, arXiv 1910.04867), as plain data."""

from collections.abc import Callable
from typing import NamedTuple

from vit_jax.lab.data import vtab_examples as examples

# Splits of the data sets that the tasks cut theirs from: what is trained on, what
# chooses hyperparameters, what is reported.
_OWN = ('train', 'validation', 'test')
_CUT_80 = ('train[:80%]', 'train[80%:]', 'test')
_CUT_90 = ('train[:90%]', 'train[90%:]', 'test')
_THREE = ('train[:60%]', 'train[60%:80%]', 'train[80%:]')

_COUNTS = tuple(f'{n} objects' for n in range(3, 11))
_DEPTHS = ('below 8', '8 to 8.5', '8.5 to 9', '9 to 9.5', '9.5 to 10', 'above 10')
_METRES = ('below 8 m', '8 to 20 m', 'above 20 m', 'no vehicle')
# What the indices stand for, by the page of the small NORB data set.
_AZIMUTHS = tuple(f'{angle} degrees' for angle in range(0, 360, 20))
_ELEVATIONS = tuple(f'{angle} degrees' for angle in range(30, 75, 5))


class Task(NamedTuple):
  """A task.

  Attributes:
    title: as the ViT paper's Table 9 writes it.
    group: 'natural', 'specialized' or 'structured'.
    classes: K.
    tfds: the data set's name in TFDS.
    versions: of it, from the first and below the second; see `tfds.Prepared`.
    parts: split expressions of the data set; see `splits_of`.
    label: an example -> its class.
    names: of the K classes; (): those that TFDS has, if any.
    image: an encoded image -> another; None: as it is.
    flip: whether an image mirrored left to right has the same label.
    crop: whether a part of an image of most of its width and height has the same label.
  """

  title: str
  group: str
  classes: int
  tfds: str
  versions: tuple[str, str]
  parts: tuple[str, str, str]
  label: Callable[[dict], int] = examples.feature()
  names: tuple[str, ...] = ()
  image: Callable[[bytes], bytes] | None = None
  flip: bool = True
  crop: bool = True


# In the order of Table 9. `flip` and `crop` follow the rule of BiT, whose preprocessing
# the paper uses ("except where cropping or horizontal flipping destroys the label
# semantics", arXiv 1912.11370 section 3.3), which names no tasks. Flips change digits,
# azimuths and what is measured from the left; crops move what has a position, and may
# cut off an object that is counted or the one that is closest.
TASKS = {
  'caltech101': Task(
    'Caltech101', 'natural', 102, 'caltech101', ('3', '4'), parts=_CUT_90
  ),
  'cifar100': Task('CIFAR-100', 'natural', 100, 'cifar100', ('3', '4'), parts=_CUT_90),
  'dtd': Task('DTD', 'natural', 47, 'dtd', ('3', '4'), parts=_OWN),
  'flowers102': Task(
    'Flowers102', 'natural', 102, 'oxford_flowers102', ('2', '3'), parts=_OWN
  ),
  # The benchmark took version 3, which TFDS no longer makes; version 4 adds boxes of
  # heads and writes 12 broken images anew.
  'pets': Task('Pets', 'natural', 37, 'oxford_iiit_pet', ('3', '5'), parts=_CUT_80),
  'sun397': Task('Sun397', 'natural', 397, 'sun397/tfds', ('4', '5'), parts=_OWN),
  'svhn': Task(
    'SVHN', 'natural', 10, 'svhn_cropped', ('3', '4'), parts=_CUT_90, flip=False
  ),
  'camelyon': Task(
    'Camelyon', 'specialized', 2, 'patch_camelyon', ('2', '3'), parts=_OWN
  ),
  'eurosat': Task(
    'EuroSAT', 'specialized', 10, 'eurosat/rgb', ('2', '3'), parts=_THREE
  ),
  'resisc45': Task('Resisc45', 'specialized', 45, 'resisc45', ('3', '4'), parts=_THREE),
  'retinopathy': Task(
    'Retinopathy',
    'specialized',
    5,
    'diabetic_retinopathy_detection/btgraham-300',
    ('3', '4'),
    parts=_OWN,
  ),
  'clevr_count': Task(
    'Clevr-Count',
    'structured',
    8,
    'clevr',
    ('3', '4'),
    parts=('train[:90%]', 'train[90%:]', 'validation'),  # its test split has no labels
    label=examples.clevr_count,
    names=_COUNTS,
    crop=False,
  ),
  'clevr_dist': Task(
    'Clevr-Dist',
    'structured',
    6,
    'clevr',
    ('3', '4'),
    parts=('train[:90%]', 'train[90%:]', 'validation'),
    label=examples.clevr_distance,
    names=_DEPTHS,
    crop=False,
  ),
  'dmlab': Task('DMLab', 'structured', 6, 'dmlab', ('2', '3'), parts=_OWN),
  'dspr_loc': Task(
    'dSpr-Loc',
    'structured',
    16,
    'dsprites',
    ('2', '3'),
    parts=('train[:80%]', 'train[80%:90%]', 'train[90%:]'),
    label=examples.binned('label_x_position', 32, 16),
    image=examples.white,
    flip=False,
    crop=False,
  ),
  'dspr_ori': Task(
    'dSpr-Ori',
    'structured',
    16,
    'dsprites',
    ('2', '3'),
    parts=('train[:80%]', 'train[80%:90%]', 'train[90%:]'),
    label=examples.binned('label_orientation', 40, 16),
    image=examples.white,
    flip=False,
    crop=False,
  ),
  # The benchmark's code asks for 3.1, which VPT found to be wrong (task_adaptation's issue
  # 18); 3.2 took a newer development kit, which the splits are made from.
  'kitti_dist': Task(
    'KITTI-Dist',
    'structured',
    4,
    'kitti',
    ('3.2', '4'),
    parts=_OWN,
    label=examples.kitti_distance,
    names=_METRES,
    crop=False,
  ),
  'snorb_azim': Task(
    'sNORB-Azim',
    'structured',
    18,
    'smallnorb',
    ('2', '3'),
    parts=('train', 'test[:50%]', 'test[50%:]'),
    label=examples.feature('label_azimuth'),
    names=_AZIMUTHS,
    flip=False,
  ),
  'snorb_elev': Task(
    'sNORB-Elev',
    'structured',
    9,
    'smallnorb',
    ('2', '3'),
    parts=('train', 'test[:50%]', 'test[50%:]'),
    label=examples.feature('label_elevation'),
    names=_ELEVATIONS,
  ),
}
