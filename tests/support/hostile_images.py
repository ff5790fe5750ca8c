"""Hundreds of odd, broken and hostile files that a folder of images may hold.

`cases(folder)` writes them one after another; the reader of training and `predict` must
each decode a file or report it as a bad image in one line.
"""

import contextlib
import io
import itertools
import os
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

FORMATS = {
  **{'jpg': 'JPEG', 'png': 'PNG', 'gif': 'GIF', 'bmp': 'BMP', 'webp': 'WEBP'},
  **{'tif': 'TIFF', 'ppm': 'PPM', 'tga': 'TGA', 'avif': 'AVIF', 'jp2': 'JPEG2000'},
}
_CUTS = (0, 1, 4, 12, 0.1, 0.5, 0.9, -1)


def cases(folder: Path, thorough: bool = True) -> Iterator[tuple[str, Path]]:
  """Yields (case, path); the file lies in a folder of its own below `folder`.

  Args:
    thorough: all of them, more than 250; otherwise a third, at least one of each kind.
  """
  whole = {s: encode(picture(), form) for s, form in FORMATS.items()}
  every = itertools.chain(
    _whole(whole), _damaged(whole), _liars(whole), _odd(whole['jpg'])
  )
  for number, (name, suffix, make) in enumerate(every):
    if not thorough and number % 3 and not name.startswith('odd'):
      continue
    home = folder / f'{number:03}'
    home.mkdir(parents=True)
    path = home / f'x.{suffix}'
    if isinstance(make, bytes):
      path.write_bytes(make)
    else:
      path = make(path) or path
    yield name, path


def picture(mode: str = 'RGB', size=(30, 20), seed: int = 0) -> Image.Image:
  rng = np.random.default_rng(seed)
  small = Image.fromarray(rng.integers(0, 256, (4, 6, 3), np.uint8))
  return small.resize(size, Image.Resampling.BICUBIC).convert(mode)


def encode(image: Image.Image, form='PNG', orientation=0, **options) -> bytes:
  """Returns the bytes of a file, with an orientation in its EXIF if one is given."""
  if orientation:
    options['exif'] = Image.Exif()
    options['exif'][0x0112] = orientation
  out = io.BytesIO()
  image.save(out, form, **options)
  return out.getvalue()


def _whole(whole):
  """Valid images, as cameras and programs write them."""
  for suffix, data in whole.items():
    yield f'good {suffix}', suffix, data
    yield f'good {suffix} in capitals', suffix.upper(), data
  for mode in ('L', '1', 'P', 'LA', 'RGBA', 'I;16', 'I'):
    image = picture('L').convert('I') if mode[0] == 'I' else picture(mode)
    if mode == 'I;16':
      image = Image.fromarray((np.asarray(image) * 257).astype(np.uint16))
    if mode != 'I':
      yield f'png {mode}', 'png', encode(image, 'PNG')
    if mode not in ('LA',):
      yield f'tif {mode}', 'tif', encode(image, 'TIFF')
  palette = picture('RGBA').quantize(16)
  yield 'png palette and alpha', 'png', encode(palette, 'PNG', transparency=3)
  yield 'gif transparent', 'gif', encode(picture('P'), 'GIF', transparency=0)
  yield 'tif float', 'tif', encode(picture('F'), 'TIFF')
  yield 'tif CMYK', 'tif', encode(picture('CMYK'), 'TIFF')
  yield 'tif LAB', 'tif', encode(picture('RGB').convert('LAB'), 'TIFF')
  for name in ('tiff_lzw', 'tiff_deflate', 'packbits', 'jpeg'):
    yield f'tif {name}', 'tif', encode(picture(), 'TIFF', compression=name)
  yield 'jpg CMYK', 'jpg', encode(picture('CMYK'), 'JPEG')
  yield 'jpg gray', 'jpg', encode(picture('L'), 'JPEG')
  yield 'jpg progressive', 'jpg', encode(picture(), 'JPEG', progressive=True)
  comment = b'\xff\xfe' + struct.pack('>H', 65_535) + bytes(65_533)
  data = whole['jpg'][:2] + comment * 16 + whole['jpg'][2:]
  yield 'jpg in a megabyte of comments', 'jpg', data
  for n in range(10):  # 0 and 9 are not valid orientations
    exif = Image.Exif()
    exif[0x0112] = n
    yield f'jpg orientation {n}', 'jpg', encode(picture(), 'JPEG', exif=exif)
    if n % 3 == 0:
      yield f'webp orientation {n}', 'webp', encode(picture(), 'WEBP', exif=exif)
      yield f'png orientation {n}', 'png', encode(picture(), 'PNG', exif=exif)
  frames = [picture(seed=i) for i in range(3)]
  for mode in ('RGB', 'RGBA'):
    for suffix in ('gif', 'webp', 'png', 'tif', 'avif'):
      first, *rest = (frame.convert(mode) for frame in frames)
      options = dict(save_all=True, append_images=rest)
      data = encode(first, FORMATS[suffix], **options)
      yield f'{suffix} of three frames, {mode}', suffix, data
  for size in ((1, 1), (1, 3000), (3000, 1), (2, 2), (7, 400)):
    for suffix in ('jpg', 'png', 'webp', 'gif'):
      data = encode(picture(size=size), FORMATS[suffix])
      yield f'{suffix} of {size[0]}x{size[1]}', suffix, data


def _damaged(whole):
  rng = np.random.default_rng(1)
  for suffix, data in whole.items():
    for cut in _CUTS:
      at = int(len(data) * cut) if 0 < cut < 1 else cut
      yield f'{suffix} cut at {cut}', suffix, data[:at]
    for i in range(8):
      flipped = bytearray(data)
      for at in rng.integers(0, len(data), 1 + 4 * i):
        flipped[at] ^= 1 << int(rng.integers(8))
      yield f'{suffix} with {1 + 4 * i} flipped bits', suffix, bytes(flipped)
    middle = len(data) // 2
    zeros = data[:middle] + bytes(64) + data[middle + 64 :]
    yield f'{suffix} with zeros', suffix, zeros
    yield f'{suffix} twice', suffix, data + data
    yield f'{suffix} after a byte', suffix, b'\0' + data
    yield f'{suffix} and rubbish', suffix, data + rng.bytes(500)


def _liars(whole):
  """Files whose name or header contradicts their content."""
  suffixes = list(whole)
  for suffix, other in zip(suffixes, suffixes[1:] + suffixes[:1], strict=True):
    yield f'{other} named {suffix}', suffix, whole[other]
  others = {
    'HTML': b'<!DOCTYPE html><html><body>404 Not Found</body></html>',
    'text': b'This is text, not an image.',
    'SVG': b'<svg xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9"/></svg>',
    'zeros': bytes(10_000),
    'random': np.random.default_rng(2).bytes(10_000),
    'a shell script': b'#!/bin/sh\ntouch PWNED\n',
    'a PostScript program': b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nquit\n',
    'a pickle': b"\x80\x04cos\nsystem\n(S'touch PWNED'\ntR.",
    'a zip': b'PK\x03\x04' + bytes(60),
    'an LFS pointer': b'version https://git-lfs.github.com/spec/v1\noid sha256:0\n',
    'a HEIC header': b'\0\0\0\x18ftypheic\0\0\0\0mif1heic' + bytes(100),
    'an AVIF header': b'\0\0\0\x18ftypavif\0\0\0\0mif1avif' + bytes(100),
    'a JPEG header': b'\xff\xd8\xff\xe0',
    'an APNG header': b'\x89PNG\r\n\x1a\n',
    'a RIFF header': b'RIFF\x10\0\0\0WEBPVP8X',
  }
  for name, data in others.items():
    for suffix in ('jpg', 'png'):
      yield f'{name} named {suffix}', suffix, data
  for side in (2**31 - 1, 10**9, 65_536, 9_000):
    yield f'png of {side} squared by its header', 'png', png(side, side, b'')
    ppm = f'P6 {side} {side} 255\n'.encode()
    yield f'ppm of {side} squared by its header', 'ppm', ppm
    yield f'bmp of {side} squared by its header', 'bmp', bmp(side)
  yield 'png of no pixels', 'png', png(0, 0, b'')
  yield 'gif of 65535 squared', 'gif', gif(65_535)
  yield 'gif of 9000 squared', 'gif', gif(9_000)
  yield 'jpg of 65500 squared', 'jpg', _jpeg_of(whole['jpg'], 65_500)
  rows = bytes(7_000 * (7_000 // 8 + 1))
  yield 'png bomb of 49 megapixels', 'png', png(7_000, 7_000, rows)
  rows = bytes(13_000 * (13_000 // 8 + 1))
  yield 'png bomb of 169 megapixels', 'png', png(13_000, 13_000, rows)
  yield 'png text bomb', 'png', _text_bomb(whole['png'])


def _odd(jpg):
  """Paths that are not regular files, and files with unusual names."""

  def written(name):
    def make(path):
      place = Path(os.fsdecode(os.fsencode(path.parent) + b'/' + os.fsencode(name)))
      place.write_bytes(jpg)
      return place

    return make

  def linked(to):
    def make(path):
      (path.parent / 'there').write_bytes(jpg)
      path.symlink_to(to)

    return make

  def sparse(path):
    with open(path, 'wb') as file:
      file.truncate(6 << 30)

  def bound(path):
    # A socket's path has at most 107 bytes.
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as one:
      one.bind(path.name)

  yield 'odd: a FIFO', 'jpg', os.mkfifo
  yield 'odd: a socket', 'png', bound
  yield 'odd: a folder', 'jpg', Path.mkdir
  yield 'odd: a sparse file of 6 GiB', 'png', sparse
  yield 'odd: a link that leads nowhere', 'jpg', linked('nowhere')
  yield 'odd: a link to itself', 'jpg', linked('x.jpg')
  yield 'odd: a link to its folder', 'jpg', linked('.')
  yield 'odd: a link to /dev/zero', 'png', linked('/dev/zero')
  yield 'odd: a link to /dev/null', 'png', linked('/dev/null')
  yield 'odd: a good link', 'jpg', linked('there')
  yield 'odd: not UTF-8', 'jpg', written(b'caf\xe9.jpg')
  yield 'odd: not UTF-8 at all', 'jpg', written(b'\xff\xfe\x80.jpg')
  yield 'odd: a line break', 'jpg', written('a\nb.jpg')
  yield 'odd: quotes and blanks', 'jpg', written(' "it\'s", a: (1) \\ % .jpg')
  yield 'odd: a long name', 'jpg', written('x' * 250 + '.jpg')
  yield 'odd: other letters', 'jpg', written('写真 🐈.jpg')
  yield 'odd: an option', 'jpg', written('--help.jpg')


def png(width: int, height: int, rows: bytes) -> bytes:
  """A black-and-white PNG of one bit a pixel."""
  header = struct.pack('>IIBBBBB', width, height, 1, 0, 0, 0, 0)
  chunks = (b'IHDR' + header, b'IDAT' + zlib.compress(rows), b'IEND')
  return b'\x89PNG\r\n\x1a\n' + b''.join(map(_chunk, chunks))


def _chunk(content: bytes) -> bytes:
  size, crc = len(content) - 4, zlib.crc32(content)
  return struct.pack('>I', size) + content + struct.pack('>I', crc)


def bmp(side: int) -> bytes:
  data = b'BM' + struct.pack('<IHHI', 54, 0, 0, 54)
  return data + struct.pack('<IiiHHIIiiII', 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)


def gif(side: int) -> bytes:
  data = b'GIF89a' + struct.pack('<HHBBB', side, side, 0x80, 0, 0) + bytes(6)
  return data + b',' + struct.pack('<HHHHB', 0, 0, side, side, 0) + b'\x02\x00;'


def _jpeg_of(data: bytes, side: int) -> bytes:
  at = data.index(b'\xff\xc0') + 5
  return data[:at] + struct.pack('>HH', side, side) + data[at + 4 :]


def _text_bomb(data: bytes) -> bytes:
  text = b'zTXtcomment\0\0' + zlib.compress(bytes(100 << 20))
  return data[:33] + _chunk(text) + data[33:]
