"""The source `coco:`, images and objects on disk in COCO's format."""

import os
import re

from vit_jax.detection.coco import files
from vit_jax.detection.coco.objects import Truth
from vit_jax.detection.data.annotated import Annotated

_ANNOTATIONS = re.compile(r'instances_(\w+)\.json')


class Coco(Annotated):
  """The source `coco:ROOT`, or `coco:ANNOTATIONS.json,IMAGE_FOLDER`.

  ROOT is the folder in which COCO's archives were unpacked. A split NAME, such as 'val2017',
  consists of the file annotations/instances_NAME.json and the folder NAME of images. A single
  file of annotations has one split, 'train'. Images are in the order of their ids.

  Args:
    target: ROOT, or ANNOTATIONS.json,IMAGE_FOLDER.
  """

  SCHEME = 'coco'

  def find_splits(self, target: str) -> dict[str, tuple[str, ...]]:
    file, comma, folder = target.partition(',')
    if comma:
      return {'train': (os.path.expanduser(folder), file)}
    annotations = os.path.join(target, 'annotations')
    names = sorted(os.listdir(annotations)) if os.path.isdir(annotations) else []
    places = {
      match[1]: (os.path.join(target, match[1]), os.path.join(annotations, match[0]))
      for match in filter(None, map(_ANNOTATIONS.fullmatch, names))
    }
    if not places:
      raise ValueError(
        f"coco: there is no file annotations/instances_*.json in {target!r}. Expected COCO's "
        'folder, or coco:ANNOTATIONS.json,IMAGE_FOLDER'
      )
    return places

  def read_truth(self, masks: bool) -> Truth:
    return files.truth(self._places[self._split][1], masks)
