"""The base of sources of images with objects: a box and a class for each object."""

import abc
import types

from vit_jax.data.features import Feature, ImageFeature
from vit_jax.data.sources.base import Source
from vit_jax.detection.coco.objects import Truth

BOXES = types.MappingProxyType(
  {
    'boxes': Feature((None, 4), 'float32', located=True),
    'label': Feature((None,)),
  }
)


class Objects(Source):
  """Images with any number of objects, also none.

  An example has 'boxes' float32 [n, 4], top, left, bottom, right from 0 to 1 of the image,
  and 'label' int32 [n], places in `Truth.category_ids`. These are for training: they leave out crowds and whatever lies
  outside of the image. `truth` has all objects.
  """

  features = types.MappingProxyType({'image': ImageFeature(), **BOXES})

  @abc.abstractmethod
  def truth(self, masks: bool = False) -> Truth:
    """Returns all objects as annotated, in pixels; its image i is example i.

    Args:
      masks: whether to have their masks as well; ValueError if the source has none.
    """
