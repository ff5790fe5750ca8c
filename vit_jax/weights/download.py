"""From a name to a local path: the one step that needs a network, where one is needed."""

import base64
import hashlib
import http.client
import importlib.util
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from vit_jax import buckets, paths
from vit_jax.errors import (
  DiskFull,
  NotAllowed,
  RunError,
  UserError,
  disk_is_full,
  one_line,
)
from vit_jax.weights import readers

_TIMEOUT = 30  # seconds without a byte
_GS = 'https://storage.googleapis.com/'
_LONGEST = 200  # bytes of a name in the cache; file systems allow 255
_HUB_FILES = ('*.json', '*.safetensors', 'README.md')  # the card states the licence


def locate(source: str | Path) -> Path:
  """Returns the local file or folder of `source`, downloaded if need be.

  Args:
    source: a path; gs://BUCKET/FILE or https://HOST/FILE, fetched once into
      `paths.cache_dir()` (without gcsfs, gs:// of public buckets alone, by HTTPS);
      hf:OWNER/NAME[@REVISION], fetched by huggingface_hub into its own cache.

  Raises:
    UserError: no such path; a download that fails, with what to do instead.
    DiskFull: if there is no room for it.
  """
  text = str(source)
  if text.startswith('hf:'):
    return _hub(text)
  if buckets.is_url(text) and importlib.util.find_spec('gcsfs'):
    return _from_bucket(buckets.path(text))
  if text.startswith('gs://'):
    return _fetch(text, _GS + urllib.parse.quote(text.removeprefix('gs://')))
  if text.startswith('https://'):
    return _fetch(text, text)
  if '://' in text:
    raise UserError(
      f'{one_line(text)}: weights come from a path, gs://, https:// or hf:OWNER/NAME.'
    )
  try:
    path = Path(text).expanduser()
    there = path.exists()
  except (OSError, RuntimeError, ValueError) as error:
    raise UserError(f'{one_line(text)} is not a path: {one_line(error)}.') from None
  if not there:
    raise UserError(
      f'No weights at {text!r}: no such file or folder, and no name of the zoo '
      '(vit_jax inspect --zoo lists them).'
    )
  return path


def is_cached(path: Path) -> bool:
  """Whether a file is one that was downloaded: it can be removed and fetched again."""
  return paths.cache_dir() in path.parents


def _fetch(source: str, url: str) -> Path:
  target = _target(source, url)
  if target.exists():
    return target
  partial = target.with_name(f'{target.name}.{os.getpid()}.part')
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
      _receive(answer, partial)
    readers.check_whole(partial)
    partial.replace(target)
  except (OSError, http.client.HTTPException, ValueError) as error:
    if isinstance(error, urllib.error.HTTPError):
      error.close()  # it holds the connection
    raise _failed(source, target, error) from None
  finally:
    partial.unlink(missing_ok=True)
  return target


def _failed(source: str, target: Path, error: Exception) -> RunError:
  """Returns the error to raise for a download that failed."""
  if disk_is_full(error):
    return _no_room(one_line(source), one_line(error))
  why = getattr(error, 'reason', None) or error
  if isinstance(error, http.client.HTTPException):
    why = f'the server broke off or does not speak HTTP ({type(error).__name__})'
  return UserError(
    f'Could not download {one_line(source)}: {one_line(why)}. Fetch it on a machine with '
    f'network access and give the path of the file, or put it at {target}.'
  )


def _no_room(what: str, why: str) -> DiskFull:
  return DiskFull(
    f'No room for {what} in {paths.cache_dir()}: {why}. Remove what is not needed, or set '
    'VIT_JAX_CACHE to a folder on another disk.'
  )


def _target(source: str, url: str) -> Path:
  """Returns the place of a URL in the cache; each has its own, by its query too."""
  try:
    parts = urllib.parse.urlsplit(url)
    place = f'{parts.hostname or ""}{f":{parts.port}" if parts.port else ""}'
  except ValueError as error:
    raise UserError(f'{one_line(source)} is not a URL: {one_line(error)}.') from None
  path = [part for part in urllib.parse.unquote(parts.path).split('/') if part]
  odd = any(part in ('.', '..') or not part.isprintable() for part in (place, *path))
  if not place or not path or odd or parts.path.endswith('/'):
    raise UserError(f'{one_line(source)} names no file.')
  if parts.query:
    key = hashlib.sha256(parts.query.encode()).hexdigest()[:16]
    stem, dot, suffix = path[-1].rpartition('.')
    path[-1] = f'{stem}-{key}.{suffix}' if dot else f'{path[-1]}-{key}'
  if max(len(os.fsencode(part)) for part in (place, *path)) > _LONGEST:
    raise UserError(
      f'{one_line(source)} has a name of more than {_LONGEST} bytes: download it yourself '
      'and give the path.'
    )
  return paths.cache_dir().joinpath(place, *path)


def _receive(answer, path: Path) -> None:
  """Writes the body of an HTTP answer to `path`.

  Its length is compared with Content-Length and its MD5 with that of Google Cloud Storage
  (x-goog-hash), where the server sends them. No publisher of the zoo's files gives
  checksums of its own.

  Raises:
    OSError: if the body is not whole.
    DiskFull: if it will not fit.
  """
  coding = answer.headers.get('Content-Encoding', 'identity')
  if coding != 'identity':
    raise OSError(f'the server sends it compressed ({coding})')
  length = answer.headers.get('Content-Length')
  if length is not None:
    if not length.isdecimal():
      raise OSError(f'the server gives {length!r} as its length')
    if int(length) > (free := shutil.disk_usage(path.parent).free):
      raise _no_room(f'{int(length):,} bytes', f'{free:,} are free')
  done, md5 = 0, hashlib.md5(usedforsecurity=False)
  with path.open('wb') as file:
    while block := answer.read(1 << 20):
      file.write(block)
      md5.update(block)
      done += len(block)
  if length is not None and done != int(length):
    raise OSError(f'{done} of {length} bytes came')
  for value in answer.headers.get_all('x-goog-hash') or ():
    for name, _, told in (part.strip().partition('=') for part in value.split(',')):
      if name == 'md5' and told != base64.b64encode(md5.digest()).decode():
        raise OSError('its MD5 is not the one that the server gives')


def _from_bucket(source: buckets.BucketPath) -> Path:
  """Returns the copy in the cache of an object, or of a folder as on a hub."""
  if '..' in source.parts:
    raise UserError(f'{source} names no file.')
  target = paths.cache_dir().joinpath('storage.googleapis.com', *source.parts[1:])
  if target.exists():
    return target
  whole = source.is_file()
  files = [source]
  if not whole:
    files = [f for f in source.glob('*') if any(map(f.match, _HUB_FILES))]
    if not any(file.suffix == '.safetensors' for file in files):
      raise UserError(f'There is no {source}, or it is a folder without *.safetensors.')
  target.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=target.parent) as folder:
    partial = Path(folder, target.name)
    if not whole:
      partial.mkdir()
    for file in files:
      copy = partial if whole else partial / file.name
      try:
        buckets.download(file, copy)
        if whole or copy.suffix in readers.SUFFIXES:
          readers.check_whole(copy)
      except NotAllowed:
        raise
      except (OSError, ValueError) as error:
        raise _failed(str(file), target, error) from None
    try:
      partial.rename(target)
    except OSError:
      if not target.is_dir():  # else another process has fetched the folder meanwhile
        raise
  return target


def _hub(source: str) -> Path:
  match = re.fullmatch(r'hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?', source)
  if not match:
    raise UserError(
      f'{one_line(source)!r}: expected hf:OWNER/NAME or hf:OWNER/NAME@REVISION.'
    )
  try:
    import huggingface_hub
  except ImportError:
    raise UserError(
      f"{source} needs the package huggingface_hub: pip install 'vit_jax[hub]'."
    ) from None
  try:
    return Path(
      huggingface_hub.snapshot_download(
        match[1],
        revision=match[2],
        allow_patterns=[*_HUB_FILES, '*.npz'],
      )
    )
  except Exception as error:  # the hub's own errors, and those of its HTTP library
    raise UserError(
      f'Could not download {source}: {type(error).__name__}: '
      f'{one_line((str(error).splitlines() or [""])[0])}. Download the folder (config.json '
      'and *.safetensors) elsewhere and give its path.'
    ) from None
