"""ImageNet-21k (Deng et al., CVPR 2009; image-net.org, after registration).

Its archive is a tar of one tar for each WordNet id, nXXXXXXXX.tar, with
nXXXXXXXX_NNN.JPEG inside. The releases differ in their classes (fall11_whole.tar 21,841,
winter21_whole.tar.gz 19,167 in timm's lists; the published models 21,843), so the archive
itself says which there are.
"""

import dataclasses
import itertools
import os
import re

from vit_jax.data.prepare import folders, tars
from vit_jax.data.prepare.entries import Entry
from vit_jax.data.prepare.plan import LeftOut, Place, Plan, number
from vit_jax.data.sources.listing import extensions
from vit_jax.errors import UserError

# A look at so many files of an archive tells whether it can be ImageNet-21k.
_LOOKS = 50
_WORDNET_ID = re.compile(r'n\d{8}')


@dataclasses.dataclass(frozen=True)
class _Synsets:
  """The class is the tar, or the folder, of a WordNet id; all is one split, 'full'."""

  def __call__(self, entry: Entry) -> Place:
    synset = entry.folder.rpartition('/')[2]
    if not _WORDNET_ID.fullmatch(synset):
      raise LeftOut('not in a tar or folder of a WordNet id (nXXXXXXXX)')
    name = entry.path.rpartition('/')[2]
    if entry.read and not name.lower().endswith(extensions()):
      raise LeftOut('not an image by its name')
    # Without what the archive is called, so that the order does not depend on it.
    return Place(f'{synset}/{name}', 'full', (synset,))


def plan(
  source: str,
  *,
  version: str = '1.0.0',
  max_side: int | None = None,
  ranges: bool = False,
) -> Plan:
  """Returns the plan of 'imagenet21k'.

  Args:
    source: the archive, or a folder of its nXXXXXXXX.tar or nXXXXXXXX/.
    version: of the data set to write.
    max_side: see `Plan`.
    ranges: for many workers, see `tars.pieces`.

  Raises:
    UserError: if `source` is missing, empty or damaged, or no tar of WordNet ids.
  """
  if os.path.isdir(source):
    pieces = folders.pieces(source, ranges=ranges)
  else:
    pieces = tars.pieces(source, ranges=ranges)
  whole = len(pieces) == 1  # compressed: its classes show as it is read
  looks = (
    itertools.islice(pieces[0].entries(), _LOOKS) if whole else map(_first, pieces)
  )
  names = number(filter(None, map(_synset, looks)))
  if not names:
    raise UserError(
      f'{source} has no tar of a WordNet id (nXXXXXXXX.tar), as ImageNet-21k has one for '
      'each class. For other images: vit_jax prepare images'
    )
  return Plan(
    name='imagenet21k',
    version=version,
    max_side=max_side,
    pieces=tuple(pieces),
    place=_Synsets(),
    class_names=None if whole else names,
    splits=('full',),
    description=f'ImageNet-21k, from {os.path.basename(source.rstrip("/"))}. '
    'Classes are WordNet ids, in their order.',
    homepage='https://www.image-net.org',
    citation='Deng et al., ImageNet: A Large-Scale Hierarchical Image Database, '
    'CVPR 2009',
  )


def _first(piece) -> Entry | None:
  """A tar inside, or a folder, shows itself before what it holds."""
  return next(iter(piece.entries()), None)


def _synset(entry: Entry | None) -> str | None:
  synset = entry.folder.rpartition('/')[2] if entry else ''
  return synset if _WORDNET_ID.fullmatch(synset) else None
