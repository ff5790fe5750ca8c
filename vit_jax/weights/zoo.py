"""Short names of published checkpoints.

Every entry is what its publisher lists (vision_transformer's README and model table,
timm's registry); none of the files could be downloaded where this list was made. None of
them publishes checksums; a download is held against the server's (`download`).
"""

import difflib
from typing import NamedTuple

from vit_jax.errors import UserError

_VIT, _MIXER, _BIT = 'gs://vit_models', 'gs://mixer_models', 'gs://bit_models'
APACHE = 'Apache-2.0'


class Entry(NamedTuple):
  """Published weights: their address, their model, and what they were trained on."""

  name: str
  url: str
  model: str  # as `models.build` takes it
  format: str
  resolution: int  # px, of the images that it was last trained on
  classes: int | None  # None: the published head is all zeros
  data: str
  value_range: tuple[int, int] = (-1, 1)
  licence: str = APACHE


def _short(model: str) -> str:
  return model.lower().replace('/', '').replace('+', '-')


def _vit(model: str) -> str:
  """'R50+B/16' -> 'R50+ViT-B_16', the file's name."""
  stem, plus, rest = model.rpartition('+')
  return f'{stem}{plus}ViT-{rest.replace("/", "_")}'


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


def _augreg(model: str, recipe: str, rate=None, resolution=None) -> Entry:
  stem = model.replace('/', '_').replace('+', '_')
  file, name, data = f'{stem}-i21k-300ep-lr_0.001-{recipe}', _short(model), 'i21k'
  if rate:
    file += f'--imagenet2012-steps_20k-lr_{rate}-res_{resolution}'
    name, data = f'{name}-augreg-i1k-{resolution}', 'i21k, then i1k'
  else:
    name = f'{name}-augreg-i21k'
  return Entry(
    name,
    f'{_VIT}/augreg/{file}.npz',
    f'vit:{model}',
    'google',
    resolution or 224,
    1000 if rate else 21843,
    data,
  )


def _entries():
  for model in _I21K:
    name = f'{_short(model)}-i21k'
    url = f'{_VIT}/imagenet21k/{_vit(model)}.npz'
    yield Entry(name, url, f'vit:{model}', 'google', 224, None, 'i21k')
  for model in _I1K:
    name = f'{_short(model)}-i21k-i1k-384'
    url = f'{_VIT}/imagenet21k+imagenet2012/{_vit(model)}.npz'
    yield Entry(name, url, f'vit:{model}', 'google', 384, 1000, 'i21k, then i1k')
  for model in ('B/16', 'L/16'):
    name = f'{_short(model)}-i21k-i1k-224'
    url = f'{_VIT}/imagenet21k+imagenet2012/{_vit(model)}-224.npz'
    yield Entry(name, url, f'vit:{model}', 'google', 224, 1000, 'i21k, then i1k')
  for model, recipe, low, high in _AUGREG:
    yield _augreg(model, recipe)
    for rate, resolution in ((low, 224), (high, 384)):
      if rate:
        yield _augreg(model, recipe, rate, resolution)
  for row in _AUGREG_OTHERS:
    yield _augreg(*row)
  for bucket, models in (
    ('sam', ('S/16', 'B/16', 'B/32', 'L/16', 'L/32')),
    ('gsam', ('S/16', 'S/32', 'B/16', 'B/32')),
  ):
    for model in models:
      name = f'{_short(model)}-{bucket}-i1k'
      url = f'{_VIT}/{bucket}/{_vit(model)}.npz'
      yield Entry(name, url, f'vit:{model}', 'google', 224, 1000, 'i1k')
  for folder, classes in (('imagenet1k', 1000), ('imagenet21k', 21843)):
    for model in ('B/16', 'L/16'):
      short = 'i1k' if classes == 1000 else 'i21k'
      name = f'mixer-{_short(model)}-{short}'
      url = f'{_MIXER}/{folder}/Mixer-{model.replace("/", "_")}.npz'
      yield Entry(name, url, f'mixer:{model}', 'google', 224, classes, short)
  for bucket, models in (
    ('sam', ('B/16', 'B/32')),
    ('gsam', ('S/8', 'S/16', 'S/32', 'B/16', 'B/32')),
  ):
    for model in models:
      name = f'mixer-{_short(model)}-{bucket}-i1k'
      url = f'{_MIXER}/{bucket}/Mixer-{model.replace("/", "_")}.npz'
      yield Entry(name, url, f'mixer:{model}', 'google', 224, 1000, 'i1k')
  for series, data, classes in (('S', 'i1k', 1000), ('M', 'i21k', 21843)):
    for size in ('R50x1', 'R50x3', 'R101x1', 'R101x3', 'R152x2', 'R152x4'):
      name = f'bit-{series.lower()}-{size.lower()}'
      url = f'{_BIT}/BiT-{series}-{size}.npz'
      yield Entry(name, url, f'bit:{size}', 'bit', 224, classes, data)
      if series == 'M':
        url = f'{_BIT}/BiT-M-{size}-ILSVRC2012.npz'
        then = 'i21k, then i1k'
        yield Entry(f'{name}-i1k', url, f'bit:{size}', 'bit', 480, 1000, then)


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
  if near:
    from pathlib import Path

    if not Path(name).exists():
      raise UserError(
        f'{name!r} is neither a path nor a name of the zoo; close to: {near}.'
      )
  return None
