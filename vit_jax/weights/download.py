"""Turns the name of a source into a local path. Only this step may need a network."""

import hashlib
import http.client
import importlib.util
import re
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from vit_jax import errors, files, terminal
from vit_jax.errors import DiskFull, NotAllowed, UserError, disk_is_full, one_line
from vit_jax.weights import readers

TIMEOUT = 15  # seconds to wait for the next byte
# Maximum size of a download whose length the server does not give, and of one read, in bytes.
MOST, _BLOCK = 2**35, 2**20
_PUBLIC = 'storage.googleapis.com/'  # the host of objects in public buckets
# README.md is the card, which states the licence. Vocabularies are .json or .model.
_HUB_FILES = ('*.json', '*.safetensors', '*.model', 'README.md')
_HUB_NAME = r'([\w.-]+/[\w.-]+)(?:@([\w./-]+))?'


class _Redirects(urllib.request.HTTPRedirectHandler):
  """Follows no redirect from https:// to another scheme."""

  def redirect_request(self, req, fp, code, msg, headers, newurl):
    if urllib.parse.urlsplit(newurl).scheme not in ('https', req.type):
      raise urllib.error.HTTPError(req.full_url, code, 'leaves https', headers, fp)
    return super().redirect_request(req, fp, code, msg, headers, newurl)


open_url = urllib.request.build_opener(_Redirects).open


def locate(source: str | Path, names: Iterable[str] = ()) -> Path:
  """Returns the local file or folder of a source, and downloads it if need be.

  gs://BUCKET/FILE and https://HOST/FILE are downloaded once into `files.cache_dir()`. Public
  buckets are read by HTTPS, without gcsfs. hf:OWNER/NAME[@REVISION] is downloaded into the
  hub's cache, and so is OWNER/NAME, unless there is a local folder OWNER.

  Args:
    names: names that the error for an unknown source may suggest.
  """
  text = str(source)
  if text.startswith('hf:'):
    return _fetch_hub(text)
  if text.startswith(('gs://', 'https://')):
    return _fetch(text)
  if '://' in text:
    raise UserError(
      f'{_hide_secrets(text)}: expected a path, gs://, https:// or hf:OWNER/NAME.'
    )
  try:
    path = Path(text).expanduser()
    exists = path.exists()
  except (OSError, RuntimeError, ValueError) as error:
    raise UserError(f'{one_line(text)} is not a path: {one_line(error)}.') from None
  if not exists:
    none = f'{text!r} is no file, no folder and no name in vit_jax inspect --zoo.'
    file = path.suffix in (*readers.SUFFIXES, '.onnx')
    if not file and re.fullmatch(_HUB_NAME, text) and not path.parent.is_dir():
      return _fetch_hub(f'hf:{text}', f'{none} ')
    others = [x.name for x in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(none + errors.did_you_mean(path.name, [*names, *others]))
  return path


def _hide_secrets(source: str) -> str:
  """Returns a URL for messages, without user, password and query."""
  return one_line(re.sub(r'(?<=://)[^/?#]*@', '', source).partition('?')[0])


def is_cached(path: Path) -> bool:
  """Whether a file lies in the cache, so that it can be removed and downloaded again."""
  return files.cache_dir() in path.parents


def _fetch(source: str) -> Path:
  """Returns the copy of a URL in the cache, and downloads it if there is none."""
  scheme, _, rest = source.partition('://')
  place, _, query = (_PUBLIC + rest if scheme == 'gs' else rest).partition('?')
  parts = urllib.parse.unquote(place).split('/')
  if len(parts) < 2 or not all(p.isprintable() and p.strip('. ') for p in parts):
    raise UserError(f'{_hide_secrets(source)}: expected the URL of a file.')
  if '@' in parts[0]:
    raise UserError(
      f'{_hide_secrets(source)}: a URL with a password is not supported: download the file '
      'and give its path.'
    )
  # The query becomes the name of a folder, so that the file's name keeps its suffix.
  if query:
    parts.insert(-1, hashlib.sha256(query.encode()).hexdigest()[:16])
  copy = _copy_http
  if scheme == 'gs' and importlib.util.find_spec('gcsfs'):
    copy = _copy_from_bucket
  target = files.cache_dir().joinpath(*parts)
  try:
    if target.exists():
      return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
      partial = Path(folder, target.name)
      copy(source, partial)
      try:
        partial.rename(target)
      except OSError:
        # Another process may have downloaded the same folder meanwhile.
        if not target.is_dir():
          raise
  except NotAllowed:
    raise
  except (OSError, http.client.HTTPException, ValueError) as error:
    if isinstance(error, urllib.error.HTTPError):
      error.close()  # The error keeps the connection open.
    why = one_line(getattr(error, 'reason', None) or error) or type(error).__name__
    if disk_is_full(error):
      raise DiskFull(
        f'No room for {_hide_secrets(source)} in {files.cache_dir()}: {why}. Set VIT_JAX_CACHE '
        'to a folder on another disk.'
      ) from None
    raise UserError(
      f'Could not download {_hide_secrets(source)}: {why}. Put the file at {target}.'
    ) from None
  return target


def _copy_http(source: str, path: Path) -> None:
  """Writes the body of an HTTP response to a file.

  Raises:
    OSError, ValueError: if the body is incomplete.
  """
  url = source
  if source.startswith('gs://'):
    url = f'https://{_PUBLIC}{urllib.parse.quote(source.removeprefix("gs://"))}'
  with open_url(url, timeout=TIMEOUT) as answer, path.open('wb') as file:
    length = answer.headers.get('Content-Length')
    total = int(length) // _BLOCK if (length or '').isdecimal() else None
    blocks = iter(lambda: answer.read(_BLOCK), b'')
    for block in terminal.progress(blocks, total, path.name, 'MiB'):
      file.write(block)
      if total is None and file.tell() > MOST:
        raise OSError(f'received more than {MOST:,} bytes; the server gave no length')
    size = file.tell()
  if length is not None and length != str(size):
    raise OSError(f'received {size} of {length} bytes')
  readers.check_whole(path)


def _copy_from_bucket(source: str, path: Path) -> None:
  """Copies an object from a bucket, or a folder with the files that hub folders have."""

  def copy(url, path):
    with url.open('rb') as file, path.open('wb') as out:
      shutil.copyfileobj(file, out)

  url = files.path(source)
  with files.outages(url):
    if url.is_file():
      copy(url, path)
      readers.check_whole(path)
      return
    parts = [f for f in url.glob('*') if any(f.match(p) for p in _HUB_FILES)]
    if not any(file.suffix == '.safetensors' for file in parts):
      raise UserError(f'There is no {url}, or it is a folder without *.safetensors.')
    path.mkdir()
    for file in parts:
      copy(file, path / file.name)


def _fetch_hub(source: str, before: str = '') -> Path:
  match = re.fullmatch(f'hf:{_HUB_NAME}', source)
  if not match:
    raise UserError(f'{one_line(source)!r}: expected hf:OWNER/NAME[@REVISION].')
  try:
    from huggingface_hub import snapshot_download
  except ImportError:
    raise UserError(f"{before}{source} needs pip install 'vit_jax[hub]'.") from None
  fetch = lambda *patterns: Path(
    snapshot_download(match[1], revision=match[2], allow_patterns=[*patterns])
  )
  try:
    folder = fetch(*_HUB_FILES, '*.npz')
    if not any(f.suffix in ('.safetensors', '.npz') for f in folder.iterdir()):
      name = match[1].partition('/')[2]
      # There are only PyTorch's files.
      folder = fetch(*_HUB_FILES, 'pytorch_model*.bin', f'{name}.pt')
    return folder
  except Exception as error:  # the hub's own errors, and those of its HTTP library
    why = one_line((str(error).splitlines() or [''])[0])
    raise UserError(
      f'{before}Could not download {source}: {type(error).__name__}: {why}. Give a path.'
    ) from None
