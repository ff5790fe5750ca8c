"""A small ObjectNet: its folders of images, and its own files of classes."""

import json

import numpy as np
from PIL import Image

# As its files are: the challenge's own order of classes, of which a part here.
LINES = ['analog clock', 'chair', 'digital clock', 'tench, Tinca tinca', 'pill bottle']
PLACES = {409: 0, 530: 2, 0: 3, 720: 4}  # place in the order of ids: line
LABELS = {'air_freshener': 'Air freshener', 'alarm_clock': 'Alarm clock',
          'pill_bottle': 'Pill bottle'}  # fmt: skip
CLASSES = {'Alarm clock': 'analog clock; digital clock', 'Pill bottle': 'pill bottle'}


def make(tmp_path):
  """Returns the folder `objectnet-1.0`, made below another: 1, 2 and 3 images."""
  mappings = tmp_path / 'objectnet-1.0' / 'mappings'
  mappings.mkdir(parents=True)
  (mappings / 'folder_to_objectnet_label.json').write_text(json.dumps(LABELS))
  (mappings / 'objectnet_to_imagenet_1k.json').write_text(json.dumps(CLASSES))
  (mappings / 'imagenet_to_label_2012_v2').write_text('\n'.join(LINES) + '\n')
  (mappings / 'pytorch_to_imagenet_2012_id.json').write_text(json.dumps(PLACES))
  for i, name in enumerate(LABELS):
    folder = tmp_path / 'objectnet-1.0' / 'images' / name
    folder.mkdir(parents=True)
    for j in range(i + 1):
      pixels = np.full((36, 36, 3), 30 * i + 9 * j, np.uint8)
      pixels[[0, 1, -2, -1]] = pixels[:, [0, 1, -2, -1]] = (255, 0, 0)
      Image.fromarray(pixels).save(folder / f'{j}.png')
  return tmp_path / 'objectnet-1.0'
