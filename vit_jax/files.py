"""Files on disk and in buckets: paths, errors, and the one atomic writer.

A bucket, gs://BUCKET/PATH, is opened by etils.epath on top of gcsfs, and never by TensorFlow.
gcsfs repeats requests that fail for a temporary reason, for half a minute.
"""

import contextlib
import functools
import logging
import math
import os
import pathlib
import re
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO

import numpy as np
from numpy.lib import format as npy

from vit_jax.errors import NotAllowed, RunError, Unreachable, UserError, one_line

SCHEME = 'gs://'
# A request to a bucket is repeated after this many seconds without a byte.
_SILENCE = 60
# Seconds to wait for the first answer; gcsfs itself would try for two minutes.
FIRST_ANSWER = 12

# These codes and texts tell the errors apart: TensorStore and google-cloud-cpp put absl's
# status codes into theirs; gcsfs raises its own errors and those of the packages it uses.
_DENIED = re.compile('PERMISSION_DENIED|UNAUTHENTICATED|Forbidden')
_REJECTED = re.compile('^Bad Request|^Bucket is requester pays')
_OUTAGE = re.compile(
  'UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|Retry policy exhausted'
)
# A file may expand to this many bytes, however small it is.
_SMALL = 256 << 20
# Errors that libraries raise for damaged, malicious or encrypted files.
DAMAGED = (zipfile.BadZipFile, zlib.error, tokenize.TokenError, EOFError, OSError)
DAMAGED += (RuntimeError, ValueError, OverflowError, SyntaxError, TypeError)
DAMAGED += (MemoryError, KeyError, AttributeError)
_LIBRARIES = ('gcsfs', 'aiohttp', 'requests', 'urllib3', 'google')


def cache_dir() -> pathlib.Path:
  """Returns the folder for downloads, compiled programs and indices of data sets.

  It is $VIT_JAX_CACHE if that is set, otherwise vit_jax in $XDG_CACHE_HOME or ~/.cache. It can
  be deleted.
  """
  if folder := os.environ.get('VIT_JAX_CACHE'):
    return pathlib.Path(folder)
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base) / 'vit_jax'


def is_url(path) -> bool:
  """Whether a path lies in a bucket."""
  return str(path).startswith(SCHEME)


def path(name) -> pathlib.Path:
  """Converts a name that a user wrote to a path on this machine or in a bucket.

  Expands `~`. A path in a bucket is an `epath.Path`, which has the methods of `pathlib.Path`.
  """
  if is_url(name):
    if not str(name).removeprefix(SCHEME).strip('/'):
      raise UserError(f'{name} names no bucket: gs://BUCKET/PATH.')
    filesystem()
    from etils import epath

    return epath.Path(str(name))
  if '://' in str(name):
    raise UserError(f'{name}: gs:// is the only URL of a folder: mount other storage.')
  return pathlib.Path(name).expanduser()


def local_path(name, flag: str) -> pathlib.Path:
  """Returns the path of a result; raises UserError for a URL, naming `flag`."""
  if '://' in str(name):
    raise UserError(f'{flag} {name}: results are written to disk, not to a URL.')
  return pathlib.Path(name)


def replace(target, data: bytes | str | Callable[[IO[bytes]], object]) -> None:
  """Replaces a file atomically: readers see either the whole old or the whole new version.

  After an error the old file is unchanged, and no partial file is left.

  Args:
    target: the file to replace, in a folder that exists.
    data: the content, or a function that writes it to an open binary file.
  """
  target = path(target)
  if isinstance(data, str):
    data = data.encode()
  write = data if callable(data) else lambda file: file.write(data)
  if is_url(target):
    # An object appears when its upload is complete.
    with target.open('wb') as file:
      write(file)
    return
  partial = target.with_name(f'{target.name}.{os.getpid()}.tmp')
  try:
    with open(partial, 'wb') as file:
      write(file)
      file.flush()
      os.fsync(file.fileno())
    partial.replace(target)
  except BaseException:
    with contextlib.suppress(OSError):
      partial.unlink()
    raise


@contextlib.contextmanager
def reading(what, *errors: type[Exception]) -> Iterator[None]:
  """Context manager that turns errors of a damaged or malicious file into one line.

  Args:
    what: the text with which the line begins.
    errors: further types of errors, besides `DAMAGED`.
  """
  try:
    yield
  except UserError:
    raise
  except (*DAMAGED, *errors) as error:
    why = one_line(error)
    raise UserError(
      f'{what} is truncated, damaged or in another format: {why}.'
    ) from None


def check_expansion(path, total: int, times: int) -> None:
  """Raises UserError if the arrays of a large file have over `times` its size in bytes."""
  if total > max(_SMALL, times * os.path.getsize(path)):
    raise UserError(f'{path} claims to decompress to {total:,} bytes.')


def open_npz(path, times: int) -> tuple[dict[str, tuple], bytes]:
  """Opens an .npz file without running code, and reads no array.

  Args:
    path: a path on disk.
    times: a large file may decompress to at most this many times its size. Otherwise a file
      of zeros could fill the memory.

  Returns:
    ({name: (shape, dtype, load)}, the zip's comment). `load()` reads the array, and raises
    UserError if it is damaged. The file stays open for this.

  Raises:
    UserError: for anything but an .npz file with arrays of numbers or text.
  """
  with reading(path):
    if not zipfile.is_zipfile(path):
      raise ValueError('not a complete .npz')
    archive = zipfile.ZipFile(path)
    names = archive.namelist()
    if odd := [n for n in names if not n.endswith('.npy') or names.count(n) > 1]:
      raise UserError(
        f'{path} is not a valid .npz file: {odd[0]!r} is not an array, or occurs twice.'
      )
    check_expansion(path, sum(info.file_size for info in archive.infolist()), times)
    arrays = {}
    for info in archive.infolist():
      name = info.filename.removesuffix('.npy')
      where = f'{path}: array {name!r}'
      with reading(where), archive.open(info) as file:
        shape, dtype = _read_npy_header(file, info.file_size)
      load = functools.partial(_read_npy, archive, info, where)
      arrays[name] = shape, dtype, load
  return arrays, archive.comment


def _read_npy_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], np.dtype]:
  """Returns (shape, dtype) of an array in a file of `size` bytes."""
  match npy.read_magic(file):
    case (1, 0):
      shape, _, dtype = npy.read_array_header_1_0(file)
    case (2, 0):
      shape, _, dtype = npy.read_array_header_2_0(file)
    case version:
      raise ValueError(f'its format has the version {version}, expected 1.0 or 2.0')
  if dtype.hasobject:
    raise ValueError('its objects are pickled, and reading them needs allow_pickle')
  if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > size:
    raise ValueError(f'its shape is {shape}, but it has only {size:,} bytes')
  return shape, dtype


def _read_npy(
  archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str
) -> np.ndarray:
  with reading(where), archive.open(info) as file:
    return npy.read_array(file)


@functools.cache
def filesystem():
  """Returns gcsfs's file system, after setting it up for epath, Orbax and TFDS."""
  try:
    import aiohttp
    import fsspec
    import gcsfs.core
  except ImportError as error:
    raise UserError(
      f"gs:// needs the package gcsfs ({error}): pip install 'vit_jax[gcs]'."
    ) from None
  plain = gcsfs.core.GCSFileSystem
  for protocol in plain.protocol:
    # The default is a subclass that first asks for the kind of the bucket, by gRPC and with a
    # permission that few accounts have. That kind matters only for "rapid" buckets.
    fsspec.register_implementation(protocol, plain, clobber=True)
    options = fsspec.config.conf.setdefault(protocol, {})
    # Other processes write to the bucket, so a cached listing may be wrong.
    options.setdefault('use_listings_cache', False)
    options.setdefault(
      'requests_timeout',
      aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE),
    )
  # If TensorFlow is installed, epath uses TensorFlow's file system for gs://, unless this
  # variable is set before epath first checks.
  os.environ['EPATH_USE_TF'] = 'false'
  with contextlib.suppress(ImportError, AttributeError):
    from etils.epath import gpath

    gpath._is_tf_installed.cache_clear()
  # These two libraries log every error that they raise.
  for name in ('gcsfs', 'fsspec'):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  _check_answers(gcsfs.core._location())
  return fsspec.filesystem('gs')


def _check_answers(url: str) -> None:
  """Raises `Unreachable` if a server gives no answer at all; an error is an answer."""
  import threading
  import urllib.error
  import urllib.request

  why = [f'none in {FIRST_ANSWER} s']

  def ask():
    try:
      with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(url, timeout=FIRST_ANSWER).close()
      why.clear()
    except (OSError, ValueError) as error:
      why[0] = str(getattr(error, 'reason', error))

  # Ask in a thread, because without a network the name lookup may exceed any timeout.
  thread = threading.Thread(target=ask, daemon=True)
  thread.start()
  thread.join(FIRST_ANSWER)
  if why:
    raise Unreachable(f'{url} does not answer ({why[0]}), so no gs:// can be read.')


@contextlib.contextmanager
def outages(path) -> Iterator[None]:
  """Context manager that turns a failed request to a bucket into an error of one line.

  Other errors, such as those of a damaged file, are raised unchanged.

  Args:
    path: the path that gcsfs, Orbax, TensorStore or ArrayRecord use inside.
  """
  try:
    yield
  except RunError:
    raise
  except Exception as error:
    text = ' '.join(str(error).split()).strip(', ')[:200]
    line = f'{type(error).__name__}: {text}' if text else type(error).__name__
    code = getattr(error, 'code', None)
    if not is_url(path):
      raise
    if code in (401, 403) or _DENIED.search(text):
      raise NotAllowed(
        f'{path}: not allowed ({line}): log in with `gcloud auth application-default '
        'login`.'
      ) from error
    if code == 400 or _REJECTED.search(text):
      raise UserError(f'{path}: the server rejects the request ({line}).') from error
    if (
      type(error).__module__.partition('.')[0] in _LIBRARIES
      or isinstance(error, TimeoutError | ConnectionError)
      or _OUTAGE.search(text)
    ):
      raise Unreachable(
        f'{path}: the bucket does not answer ({line}): rerun the same command.'
      ) from error
    raise
