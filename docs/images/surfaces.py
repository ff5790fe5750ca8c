"""Sorts the photographs of docs/tutorials/no_labels.md into folders: doors, walls, grass, ...

  apt-get download ufoai-textures && dpkg -x ufoai-textures_*.deb ufoai
  python docs/images/surfaces.py ufoai/usr/share/games/ufoai/base/0textures.pk3

The Debian package (2.5, files under GPL and Creative Commons, see its `copyright`, so that no
picture of them is here) has the surfaces of a game, mostly from photographs. Writes them at 128 px: `photos/train` for
training without labels, and `labelled`, whose `val` has every third image of a kind.
`photos` has no image of `val`.
"""

import collections
import io
import re
import sys
import zipfile
from pathlib import Path

from PIL import Image

KINDS = (
  'bricks carpet concrete dirt door floor grass metal rock roof tiles wall window wood'
)
SIDE = 128


def main(source: str) -> None:
  archive = zipfile.ZipFile(source)
  seen, counts = set(), collections.Counter()
  for name in sorted(archive.namelist()):
    path = Path(name)
    # Normal maps and other maps of a surface have a suffix.
    if path.suffix not in ('.jpg', '.png') or re.search('_[gnrs]m$', path.stem):
      continue
    image = Image.open(io.BytesIO(archive.read(name))).convert('RGBA')
    # Small images, and those with holes.
    if min(image.size) < SIDE // 2 or image.getextrema()[3][0] < 255:
      continue
    image = image.convert('RGB').resize((SIDE, SIDE))
    contrast = sum(high - low for low, high in image.reduce(2).getextrema())
    if contrast < 60 or image.tobytes() in seen:
      continue
    seen.add(image.tobytes())
    kind = re.match('[a-z]*', path.stem.lower()).group()
    counts[kind] += 1
    split = 'train'
    folders = []
    if kind in KINDS.split():
      split = 'train' if counts[kind] % 3 else 'val'
      folders.append(Path('labelled', split, kind))
    if split == 'train':
      folders.append(Path('photos', 'train'))
    for folder in folders:
      folder.mkdir(parents=True, exist_ok=True)
      image.save(folder / f'{path.parent.name}_{path.stem}.png')


if __name__ == '__main__':
  main(sys.argv[1])
