"""From a name to a local path: the one step that needs a network, where one is needed."""

import importlib.util
import os
import re
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from vit_jax import buckets, paths
from vit_jax.errors import UserError

_TIMEOUT = 30  # seconds without a byte
_GS = 'https://storage.googleapis.com/'


def locate(source: str | Path) -> Path:
  """Returns the local file or folder of `source`, downloaded if need be.

  Args:
    source: a path; gs://BUCKET/FILE or https://HOST/FILE, fetched once into
      `paths.cache_dir()` (without gcsfs, gs:// of public buckets alone, by HTTPS); hf:OWNER/NAME[@REVISION], fetched by huggingface_hub into its
      own cache.

  Raises:
    UserError: no such path; a download that fails, with what to do instead.
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
      f'{text}: weights come from a path, gs://, https:// or hf:OWNER/NAME.'
    )
  path = Path(text).expanduser()
  if not path.exists():
    raise UserError(
      f'No weights at {text!r}: no such file or folder, and no name of the zoo '
      '(python -m vit_jax.tools.inspect --zoo lists them).'
    )
  return path


def _fetch(source: str, url: str) -> Path:
  parts = urllib.parse.urlsplit(url)
  path = Path(urllib.parse.unquote(parts.path)).parts[1:]
  if not path or '..' in path:
    raise UserError(f'{source} names no file.')
  target = paths.cache_dir().joinpath(parts.netloc, *path)
  if target.exists():
    return target
  partial = target.with_name(f'{target.name}.{os.getpid()}.part')
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
      length = answer.headers.get('Content-Length')
      with partial.open('wb') as file:
        while block := answer.read(1 << 20):
          file.write(block)
    if length is not None and partial.stat().st_size != int(length):
      raise OSError(f'{partial.stat().st_size} of {length} bytes came')
    partial.replace(target)
  except (OSError, urllib.error.URLError) as error:
    why = getattr(error, 'reason', None) or error
    raise UserError(
      f'Could not download {source}: {why}. Fetch it on a machine with network access '
      f'and give the path of the file, or put it at {target}.'
    ) from None
  finally:
    partial.unlink(missing_ok=True)
  return target


def _from_bucket(source: buckets.BucketPath) -> Path:
  """Returns the copy of an object, or of a folder as on a hub, made once."""
  if '..' in source.parts:
    raise UserError(f'{source} names no file.')
  target = paths.cache_dir().joinpath('storage.googleapis.com', *source.parts[1:])
  if target.exists():
    return target
  whole = source.is_file()
  files = [source] if whole else list(source.glob('*'))
  files = [file for file in files if whole or file.suffix in ('.json', '.safetensors')]
  if not files:
    raise UserError(
      f'There is no {source}, or it is a folder without config.json and *.safetensors.'
    )
  target.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=target.parent) as partial:
    for file in files:
      try:
        buckets.download(file, Path(partial, file.name))
      except OSError as error:
        raise UserError(f'Could not download {file}: {error}.') from None
    (Path(partial, source.name) if whole else Path(partial)).rename(target)
    if not whole:
      os.mkdir(partial)  # for the context to remove
  return target


def _hub(source: str) -> Path:
  match = re.fullmatch(r'hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?', source)
  if not match:
    raise UserError(f'{source!r}: expected hf:OWNER/NAME or hf:OWNER/NAME@REVISION.')
  try:
    import huggingface_hub
  except ImportError:
    raise UserError(
      f"{source} needs the package huggingface_hub: pip install 'vit_jax[hub]'."
    ) from None
  try:
    return Path(
      huggingface_hub.snapshot_download(
        match[1], revision=match[2], allow_patterns=['*.json', '*.safetensors']
      )
    )
  except Exception as error:  # the hub's own errors, and those of its HTTP library
    raise UserError(
      f'Could not download {source}: {type(error).__name__}: '
      f'{str(error).splitlines()[0] if str(error) else ""} Download the folder '
      '(config.json and *.safetensors) elsewhere and give its path.'
    ) from None
