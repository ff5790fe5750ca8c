"""Requests to a bucket, by gcsfs: whole objects, conditions on generations, ranges."""

import contextlib
import errno
import functools
import json
import logging
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vit_jax.buckets.outages import raise_if_outage
from vit_jax.errors import UserError

# A request is repeated after this many seconds without a byte.
_SILENCE = 60
# Between the parts of an upload; it may not occur in the data.
_BOUNDARY = '==vit_jax.{}=='


class Object(NamedTuple):
  """An object, read by one request.

  Attributes:
    data: all of it.
    generation: changes with every write; 0 stands for an object that does not exist.
    age: seconds since it was written, by the server's clock alone.
  """

  data: bytes
  generation: int
  age: float


class Changed(OSError):
  """The object has another generation than a write asked for."""


@functools.cache
def filesystem():
  """Returns gcsfs's file system; the same one for all of this process.

  Raises:
    UserError: where gcsfs is not installed.
  """
  try:
    import aiohttp
    import fsspec
    import gcsfs.core
  except ImportError as error:
    raise UserError(
      f"gs:// needs the package gcsfs ({error}): pip install 'vit_jax[gcs]'."
    ) from None
  # For every instance, Orbax's too: other processes write to the bucket, so a cached
  # listing may be wrong.
  plain = gcsfs.core.GCSFileSystem
  for protocol in plain.protocol:
    # The default is a subclass that first asks for the kind of the bucket, by gRPC and
    # with a permission that few accounts have; all kinds but "rapid" have plain objects.
    fsspec.register_implementation(protocol, plain, clobber=True)
    options = fsspec.config.conf.setdefault(protocol, {})
    options.setdefault('use_listings_cache', False)
    options.setdefault(
      'requests_timeout',
      aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE),
    )
  _keep_epath_from_tensorflow()
  # It logs the traceback of every error that it raises.
  logging.getLogger('gcsfs').setLevel(logging.CRITICAL)
  return fsspec.filesystem('gs')


def _keep_epath_from_tensorflow() -> None:
  # Orbax and TFDS open files by etils.epath, which takes TensorFlow's file system for
  # gs:// wherever TensorFlow is installed, unless told not to before it first looks.
  os.environ['EPATH_USE_TF'] = 'false'
  with contextlib.suppress(ImportError, AttributeError):
    from etils.epath import gpath

    gpath._is_tf_installed.cache_clear()


def read(url: str) -> Object:
  """Returns an object; raises as `errors_of`."""
  fs = filesystem()
  with errors_of(url):
    headers, data = fs.call('GET', fs.url(str(url)))
  return Object(data, int(headers['X-Goog-Generation']), _age(headers))


def write(url: str, data: bytes, generation: int | None = None) -> int:
  """Replaces an object as a whole: readers see the old one or the new one.

  Args:
    generation: the one that the object must have now, 0 if it must not exist; None: any.

  Returns:
    The generation written.

  Raises:
    Changed: the object has another generation.
    Others: as `errors_of`.
  """
  fs = filesystem()
  import gcsfs.core

  bucket, key, _ = fs.split_path(str(url))
  boundary = _BOUNDARY.format(os.urandom(8).hex())
  body = (
    f'--{boundary}\nContent-Type: application/json; charset=UTF-8\n\n'
    f'{json.dumps({"name": key})}\n--{boundary}\n'
    'Content-Type: application/octet-stream\n\n'
  ).encode()
  body += data + f'\n--{boundary}--'.encode()
  condition = {} if generation is None else {'ifGenerationMatch': str(generation)}
  try:
    with errors_of(url):
      answer = fs.call(
        'POST',
        f'{fs._location}/upload/storage/v1/b/{{}}/o',
        bucket,
        uploadType='multipart',
        headers={'Content-Type': f'multipart/related; boundary="{boundary}"'},
        # Not bytes, which would be sent in one go: the lease must be renewed meanwhile.
        data=gcsfs.core.UnclosableBytesIO(body),
        json_out=True,
        **condition,
      )
  except FileExistsError:  # 412
    # Ours, if the answer to a request that was then repeated got lost.
    with contextlib.suppress(FileNotFoundError):
      found = read(url)
      if found.data == data and found.generation > generation:
        return found.generation
    raise Changed(f'{url} was written by another process') from None
  return int(answer['generation'])


def download(url: str, path) -> None:
  """Copies an object to a file; raises as `read`, and OSError for an incomplete copy."""
  fs = filesystem()
  size, _ = size_and_generation(url)
  with errors_of(url):
    fs.get_file(str(url), str(path))
  if (came := os.path.getsize(path)) != size:
    raise OSError(f'{url}: {came} of {size} bytes came')


def upload(path, url: str) -> None:
  """Copies a file to an object, in pieces if it is large; raises as `write`."""
  with errors_of(url):
    filesystem().put_file(str(path), str(url))


def size_and_generation(url: str) -> tuple[int, int]:
  """Returns an object's size in bytes and its generation; raises as `read`."""
  with errors_of(url):
    found = filesystem().info(str(url))
  if found['type'] != 'file':
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(url))
  return found['size'], int(found['generation'])


def ranges(url: str, bounds: Sequence[tuple[int, int]]) -> list[bytes]:
  """Returns bytes [start, stop) of an object for each of `bounds`, read at once.

  Raises:
    EOFError: the object ends before.
    Others: as `errors_of`.
  """
  starts, stops = zip(*bounds, strict=True)
  with errors_of(url):
    out = filesystem().cat_ranges(
      [str(url)] * len(bounds), list(starts), list(stops), on_error='raise'
    )
  for data, start, stop in zip(out, starts, stops, strict=True):
    if len(data) != stop - start:
      raise EOFError(
        f'{url} ends before byte {stop}: {len(data)} of {stop - start} came'
      )
  return out


@contextlib.contextmanager
def errors_of(url) -> Iterator[None]:
  """Raises errors of one line in place of what gcsfs and its libraries raise.

  Raises:
    FileExistsError: as gcsfs does, where a condition does not hold.
    FileNotFoundError: there is no such object or bucket.
    NotAllowed, UserError, Unreachable: see `raise_if_outage`.
    OSError: of the local disk, where a file is copied.
  """
  try:
    yield
  except FileExistsError:
    raise
  except FileNotFoundError:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(url)) from None
  except Exception as error:
    raise_if_outage(error, url)
    raise


def _age(headers) -> float:
  from email.utils import parsedate_to_datetime

  now, then = (parsedate_to_datetime(headers[k]) for k in ('Date', 'Last-Modified'))
  return max((now - then).total_seconds(), 0.0)
