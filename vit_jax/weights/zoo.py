"""Short names of published checkpoints.

Every entry is what its publisher lists (vision_transformer's README and model table,
timm's registry); none of the files could be downloaded where this list was made. None of
them publishes checksums; a download is held against the server's (`download`).
"""

import difflib
from pathlib import Path
from typing import NamedTuple

from vit_jax.errors import UserError

APACHE = 'Apache-2.0'


class Entry(NamedTuple):
  """Published weights: their address, their model, and the data they were trained on."""

  name: str
  url: str
  model: str  # as `models.build` takes it
  format: str
  resolution: int  # px, of the images that it was last trained on
  classes: int | None  # None: the published head is all zeros
  data: str
  licence: str = APACHE


# "An Image is Worth 16x16 Words". The heads over i21k were never released.
_I21K = ('B/32', 'B/16', 'B/8', 'L/32', 'L/16', 'H/14')
_I21K += ('R26+B/32', 'R50+B/16', 'R50+L/32')
_I1K = ('B/32', 'B/16', 'B/8', 'L/32', 'L/16', 'R50+B/16', 'R50+L/32')

# AugReg (arXiv 2106.10270): the checkpoints that timm's registry recommends, as
# (model, pre-training, fine-tuning rate at 224, ... at 384; None: not listed).
_AUGREG = (
  ('Ti/16', 'aug_none-wd_0.03-do_0.0-sd_0.0', 0.03, 0.03),
  ('S/32', 'aug_light1-wd_0.03-do_0.0-sd_0.0', 0.03, 0.03),
  ('S/16', 'aug_light1-wd_0.03-do_0.0-sd_0.0', 0.03, 0.03),
  ('B/32', 'aug_medium1-wd_0.03-do_0.0-sd_0.0', 0.03, None),
  ('B/16', 'aug_medium1-wd_0.1-do_0.0-sd_0.0', 0.01, 0.01),
  ('B/8', 'aug_medium1-wd_0.1-do_0.0-sd_0.0', 0.01, None),
  ('L/16', 'aug_medium1-wd_0.1-do_0.1-sd_0.1', 0.01, 0.01),
  ('R+Ti/16', 'aug_none-wd_0.03-do_0.0-sd_0.0', 0.03, 0.03),
  ('R26+S/32', 'aug_medium2-wd_0.03-do_0.0-sd_0.0', None, 0.03),
  ('R50+L/32', 'aug_medium2-wd_0.1-do_0.0-sd_0.0', None, 0.01),
)
# Fine-tuned from another pre-training than the recommended one.
_AUGREG_OTHERS = (
  ('B/32', 'aug_light1-wd_0.1-do_0.0-sd_0.0', 0.03, 384),
  ('R26+S/32', 'aug_light0-wd_0.03-do_0.1-sd_0.1', 0.03, 224),
  ('R50+L/32', 'aug_medium1-wd_0.1-do_0.1-sd_0.1', 0.01, 224),
)


# Trained with sharpness-aware minimisation on i1k: (family, folder) -> models.
_SAM = {
  ('vit', 'sam'): ('S/16', 'B/16', 'B/32', 'L/16', 'L/32'),
  ('vit', 'gsam'): ('S/16', 'S/32', 'B/16', 'B/32'),
  ('mixer', 'sam'): ('B/16', 'B/32'),
  ('mixer', 'gsam'): ('S/8', 'S/16', 'S/32', 'B/16', 'B/32'),
}
_BIT_SIZES = ('R50x1', 'R50x3', 'R101x1', 'R101x3', 'R152x2', 'R152x4')
_THEN = 'i21k, then i1k'


def _entry(model, name, path, resolution=224, classes=1000, data='i1k') -> Entry:
  """Returns an entry.

  Args:
    model: 'vit:B/16'.
    name: after the size, '{}-i21k'.
    path: in the family's bucket, after which '.npz' comes; {} is the file of the model.
  """
  family, _, size = model.partition(':')
  stem, plus, rest = size.rpartition('+')
  file = {
    'vit': f'{stem}{plus}ViT-{rest.replace("/", "_")}',  # 'R50+ViT-B_16'
    'mixer': f'Mixer-{size.replace("/", "_")}',
    'bit': size,
  }[family]
  short = size.lower().replace('/', '').replace('+', '-')
  url = f'gs://{family}_models/{path.format(file)}.npz'
  format = 'bit' if family == 'bit' else 'google'
  return Entry(name.format(short), url, model, format, resolution, classes, data)


def _augreg(size: str, recipe: str, rate=None, resolution=224) -> Entry:
  stem = size.replace('/', '_').replace('+', '_')
  path = f'augreg/{stem}-i21k-300ep-lr_0.001-{recipe}'
  if not rate:
    return _entry(f'vit:{size}', '{}-augreg-i21k', path, classes=21843, data='i21k')
  path += f'--imagenet2012-steps_20k-lr_{rate}-res_{resolution}'
  name = f'{{}}-augreg-i1k-{resolution}'
  return _entry(f'vit:{size}', name, path, resolution, data=_THEN)


def _entries():
  for size in _I21K:
    yield _entry(f'vit:{size}', '{}-i21k', 'imagenet21k/{}', 224, None, 'i21k')
  tuned = 'imagenet21k+imagenet2012/{}'
  for size in _I1K:
    yield _entry(f'vit:{size}', '{}-i21k-i1k-384', tuned, 384, data=_THEN)
  for size in ('B/16', 'L/16'):
    yield _entry(f'vit:{size}', '{}-i21k-i1k-224', f'{tuned}-224', data=_THEN)
  for size, recipe, low, high in _AUGREG:
    yield _augreg(size, recipe)
    for rate, resolution in ((low, 224), (high, 384)):
      if rate:
        yield _augreg(size, recipe, rate, resolution)
  for row in _AUGREG_OTHERS:
    yield _augreg(*row)
  for folder, classes, data in (
    ('imagenet1k', 1000, 'i1k'),
    ('imagenet21k', 21843, 'i21k'),
  ):
    for size in ('B/16', 'L/16'):
      name, path = f'mixer-{{}}-{data}', f'{folder}/{{}}'
      yield _entry(f'mixer:{size}', name, path, 224, classes, data)
  for (family, folder), sizes in _SAM.items():
    prefix = '' if family == 'vit' else 'mixer-'
    for size in sizes:
      yield _entry(f'{family}:{size}', f'{prefix}{{}}-{folder}-i1k', f'{folder}/{{}}')
  for size in _BIT_SIZES:
    yield _entry(f'bit:{size}', 'bit-s-{}', 'BiT-S-{}')
    yield _entry(f'bit:{size}', 'bit-m-{}', 'BiT-M-{}', 224, 21843, 'i21k')
    path = 'BiT-M-{}-ILSVRC2012'
    yield _entry(f'bit:{size}', 'bit-m-{}-i1k', path, 480, data=_THEN)


ENTRIES = {entry.name: entry for entry in _entries()}


def called(address: str, file: str) -> list[Entry]:
  """Returns the entries of that address, else those whose files have that name."""
  exact = [e for e in ENTRIES.values() if e.url == address]
  return exact or [e for e in ENTRIES.values() if e.url.rpartition('/')[2] == file]


def find(name: str) -> Entry | None:
  """Returns the entry of that name, None for a path or a URL.

  Raises:
    UserError: for what looks like a name and is close to one, but is not in the zoo.
  """
  name = str(name)
  if name in ENTRIES:
    return ENTRIES[name]
  if any(c in name for c in '/:\\.'):
    return None
  near = difflib.get_close_matches(name, ENTRIES, n=3, cutoff=0.7)
  if near and not Path(name).exists():
    raise UserError(
      f'{name!r} is neither a path nor a name of the zoo; close to: {near}.'
    )
  return None
