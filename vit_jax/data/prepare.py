"""TFDS builders for ImageNet-21k, and for folders and tars of images.

TFDS orders the examples by a hash of their keys, writes them as ArrayRecord shards, and
moves the data set to its place once it is complete. With Apache Beam the same builders run
on a cluster. Nothing is unpacked: a tar, also one inside another tar, counts as a folder
with the name of the tar.
"""

import concurrent.futures
import functools
import io
import itertools
import logging
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from vit_jax import files
from vit_jax.data import image_file
from vit_jax.data.ops.decode import probe
from vit_jax.data.sources import folder, splits
from vit_jax.errors import BadImage, UserError, one_line

_TAR = re.compile(r'(?P<stem>.+?)\.(tar(\.(gz|bz2|xz))?|tgz|tbz2|txz)', re.IGNORECASE)
# Number of images that are decoded at a time, to check that they are complete.
_CHUNK = 256
# JPEG quality of rotated or shrunk images, visually lossless.
_QUALITY = 95


class Kind(NamedTuple):
  """A kind of data set."""

  name: str
  # Description, homepage and citation.
  about: dict[str, str]
  # Maps (file name, class or '') to (key, split, class), or to None to skip the file.
  place: Callable[[str, str], tuple[str, str, str] | None]
  # Whether to rotate images as their EXIF says, because readers of prepared data ignore it.
  upright: bool


def _place_synset(name: str, label: str) -> tuple[str, str, str] | None:
  *_, synset, file = ['', *name.split('/')]
  if not re.fullmatch(r'n\d{8}', synset):
    return None
  # The key leaves out the archive's name, so that the order does not depend on it.
  return f'{synset}/{file}', 'full', synset


def _place_image(name: str, label: str) -> tuple[str, str, str] | None:
  *above, own, _ = ['', '', *name.split('/')]
  named = (splits.canonical(part) for part in above)
  split = next((part for part in named if part in splits.SYNONYMS), 'train')
  label = label or own
  return (name, split, label) if label else None


IMAGENET21K = Kind(
  name='imagenet21k',
  about=dict(
    description='ImageNet-21k. Classes are WordNet ids, in their order.',
    homepage='https://www.image-net.org',
    citation='Deng et al., ImageNet: A Large-Scale Hierarchical Image Database, CVPR 2009',
  ),
  place=_place_synset,
  # Published results ignore the EXIF orientation of these images.
  upright=False,
)


def images(name: str) -> Kind:
  """Returns the kind for a user's images, SPLIT/CLASS/IMAGE, where SPLIT may be absent."""
  if not re.fullmatch('[a-z][a-z0-9_]*', name):
    raise UserError(f"--name {name!r} is not a lower-case name such as 'my_pets'.")
  return Kind(name, {'description': f'Images of {name}.'}, _place_image, upright=True)


def builder(
  kind: Kind,
  sources: Iterable[str],
  data_dir: str,
  *,
  version: str = '1.0.0',
  max_side: int | None = None,
  beam: bool = False,
) -> tuple:
  """Returns a TFDS builder, and a list that it fills with (name, reason) of broken images.

  TFDS needs the classes before the first example, so all names in the input are listed
  first.

  Args:
    kind: IMAGENET21K or `images(name)`.
    sources: a folder of classes, a folder of tars, or tars.
    data_dir: parent folder of all data sets, on a disk or in a bucket.
    max_side: shrinks images so that their longer side has at most this many pixels, and
      stores them as JPEG.
    beam: generates the examples with Beam. Broken images are then logged, not collected.
  """
  import tensorflow_datasets as tfds

  if not sys.stderr.isatty():
    tfds.disable_progress_bar()
  pieces_of: dict[str, list[Piece]] = {}
  # {folder: its first piece}.
  labels, first = set(), {}
  for piece in itertools.chain.from_iterable(map(_pieces, sources)):
    names = [name for name, _ in _files(piece)]
    other = first.setdefault(piece.folder, piece)
    if other is not piece and (twice := {name for name, _ in _files(other)} & {*names}):
      raise UserError(f'{other.path} and {piece.path} both contain {min(twice)}.')
    places = [place for name in names if (place := kind.place(name, piece.label))]
    labels |= {label for *_, label in places}
    for split in {split for _, split, _ in places}:
      pieces_of.setdefault(split, []).append(piece)
  if not labels:
    home = 'WordNet ids (nXXXXXXXX)' if kind is IMAGENET21K else 'classes'
    raise UserError(f'{" ".join(sources)}: found no images in folders named by {home}.')
  make = functools.partial(_examples, kind=kind, max_side=max_side)
  broken: list[tuple[str, str]] = []

  class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    name = kind.name
    VERSION = tfds.core.Version(version)

    def _info(self):
      features = {
        'image': tfds.features.Image(),
        'label': tfds.features.ClassLabel(names=sorted(labels)),
        'file_name': tfds.features.Text(),
      }
      return tfds.core.DatasetInfo(
        builder=self,
        supervised_keys=('image', 'label'),
        features=tfds.features.FeaturesDict(features),
        **kind.about,
      )

    def _split_generators(self, dl_manager):
      return {split: self._generate_examples(split) for split in sorted(pieces_of)}

    def _generate_examples(self, split):
      examples = functools.partial(make, split=split)
      if not beam:
        return examples(pieces_of[split], broken=broken)
      import apache_beam

      return (
        apache_beam.Create([[piece] for piece in pieces_of[split]])
        | f'Spread {split}' >> apache_beam.Reshuffle()
        | f'Read {split}' >> apache_beam.FlatMap(examples)
      )

  return Builder(data_dir=data_dir, file_format='array_record'), broken


def download_config(runner: str | None, options: list[str]):
  """Returns the `download_config` of TFDS's `download_and_prepare`.

  Args:
    runner: name of Beam's runner; None: without Beam.
    options: pipeline options of Beam.
  """
  import tensorflow_datasets as tfds

  config = tfds.download.DownloadConfig
  if not runner:
    return config(try_download_gcs=False)
  try:
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

    beam.runners.create_runner(runner)
  except (ImportError, ValueError) as error:
    raise UserError(
      f"--beam_runner {runner}: {error} (pip install 'vit_jax[beam]', in an environment of "
      'its own).'
    ) from None
  beam_options = PipelineOptions(options)
  return config(try_download_gcs=False, beam_runner=runner, beam_options=beam_options)


def _examples(pieces, *, kind, max_side, split, broken=None) -> Iterator[tuple]:
  """Yields (key, example) for each intact image of a split."""

  def read():
    for piece in pieces:
      for name, content in _files(piece):
        key, own, label = kind.place(name, piece.label) or ('', '', '')
        if own == split:
          yield key, label, name, _attempt(content)

  def check(file):
    *names, data = file
    return *names, _attempt(lambda: clean_image(data, kind.upright, max_side))

  with concurrent.futures.ThreadPoolExecutor() as pool:
    files_of_split = read()
    while chunk := list(itertools.islice(files_of_split, _CHUNK)):
      for key, label, name, image in pool.map(check, chunk):
        if not isinstance(image, BadImage):
          yield key, {'image': image, 'label': label, 'file_name': key}
          continue
        logging.getLogger(__name__).warning('left out: %s: %s', name, image)
        if broken is not None:
          broken.append((name, str(image)))


def _attempt(read: Callable[[], bytes]) -> bytes | BadImage:
  try:
    return read()
  except BadImage as error:
    return error


def clean_image(
  data: bytes | BadImage, upright: bool, max_side: int | None = None
) -> bytes:
  """Returns the bytes to store for an encoded image; raises BadImage if it is broken.

  The bytes stay as they are unless the image has to be rotated or shrunk, which makes it a
  JPEG. Formats that only Pillow reads become PNG.
  """
  from PIL import Image, ImageOps

  if isinstance(data, BadImage):
    raise data
  data, orientation, size = probe(data, exif=upright)
  shrink = max_side is not None and max(size) > max_side
  try:
    with Image.open(io.BytesIO(data)) as image:
      if orientation == 1 and not shrink:
        # Decode a JPEG at an eighth of its size: that still reads all of its bytes.
        image.draft('L', (1, 1))
        image.load()
        return data
      if image.mode.startswith('I'):
        # Of 16 bits, keep the high 8, as training does.
        image = image.point(lambda level: level / 256).convert('L')
      image = image if image.mode in ('L', 'RGB', 'CMYK') else image.convert('RGB')
      if shrink:
        image.thumbnail((max_side, max_side), reducing_gap=3)
      image = ImageOps.exif_transpose(image) if orientation > 1 else image
      image = image.convert('L' if image.mode == 'L' else 'RGB')
      image.save(out := io.BytesIO(), 'JPEG', quality=_QUALITY)
      return out.getvalue()
  except Exception as error:  # Pillow's plugins raise many types on broken data
    raise BadImage(f'cannot be decoded: {error or type(error).__name__}') from None


# --- the input -----------------------------------------------------------------------


class Piece(NamedTuple):
  """The input of one worker: the folder of a class, or a tar, which may be in a bucket."""

  path: str
  # Prefix of the files' names, such as 'train/cat/'.
  folder: str
  # Class of all files. If empty, the class of each file is the name of its folder.
  label: str = ''


def _pieces(source: str) -> Iterator[Piece]:
  if not os.path.isdir(source):
    if not _is_tar(source):
      raise UserError(f'{source} is neither a folder nor a tar (.tar, .tar.gz, ...).')
    yield Piece(source, f'{_stem(os.path.basename(source))}/')
    return
  below = [os.path.join(at, name) for at, _, names in os.walk(source) for name in names]
  if tars := sorted(path for path in below if _is_tar(path)):
    for path in tars:
      yield Piece(path, f'{_stem(os.path.relpath(path, source))}/')
    return
  # Like a tar, the folder itself may be named after a split.
  own = os.path.basename(os.path.abspath(source))
  own = f'{own}/' if splits.canonical(own) in splits.SYNONYMS else ''
  for split, directory in folder.split_directories(source).items():
    prefix = own if directory == source else f'{split}/'
    for label in folder.folders(directory):
      yield Piece(os.path.join(directory, label), f'{prefix}{label}/', label)


def _files(piece: Piece) -> Iterator[tuple[str, Callable[[], bytes]]]:
  """Yields (name, function that reads the file) for each image of a piece.

  Call the function before requesting the next image, or not at all.
  """
  if piece.label:
    for name in sorted(folder.images_below(piece.path)[0]):
      path = os.path.join(piece.path, name)
      yield piece.folder + name, functools.partial(image_file.read, path)
    return
  try:
    with files.path(piece.path).open('rb') as file:
      yield from _files_of_tar(file, piece.folder)
  except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
    raise UserError(
      f'{piece.path} cannot be read: {one_line(error)}. Fetch it again.'
    ) from None


def _files_of_tar(file, above: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
  with tarfile.open(fileobj=file, tarinfo=_Strict) as tar:
    while member := tar.next():
      # Free the list of members, because there may be millions.
      tar.members.clear()
      name = above + _stem(member.name)
      if not member.isreg() or any(map(folder.is_hidden, name.split('/'))):
        continue
      if name.lower().endswith(folder.extensions()):
        yield name, functools.partial(_read, tar, member)
      elif _is_tar(member.name):
        yield from _files_of_tar(tar.extractfile(member), f'{name}/')


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
  image_file.check_size(member.size)
  return tar.extractfile(member).read()


class _Strict(tarfile.TarInfo):
  """A header of a tar that raises if it is damaged.

  `tarfile` itself takes a damaged or missing header for the end of the archive.
  """

  @classmethod
  def frombuf(cls, buf, encoding, errors):
    try:
      return super().frombuf(buf, encoding, errors)
    except tarfile.EOFHeaderError:
      raise
    except tarfile.HeaderError as error:
      raise tarfile.ReadError(f'{error}, or the archive ends early') from None


def _is_tar(path: str) -> bool:
  return _TAR.fullmatch(os.path.basename(path)) is not None


def _stem(name: str) -> str:
  """Returns 'x/cats' for './x/cats.tar', and 'x/1.jpg' unchanged."""
  name = os.path.normpath(name)
  return _TAR.fullmatch(name)['stem'] if _is_tar(name) else name
