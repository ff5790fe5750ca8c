"""The features of a prepared data set, and what else TFDS keeps about it."""

from vit_jax.data.prepare.plan import Place, Plan
from vit_jax.errors import UserError

FORMATS = ('array_record', 'tfrecord')


def load_tfds():
  """Returns the tensorflow_datasets module.

  Raises:
    UserError: if it is not installed.
  """
  try:
    import tensorflow_datasets as tfds
  except ImportError as error:
    raise UserError(
      f'Preparing a data set needs tensorflow_datasets ({error}): '
      "pip install 'vit_jax[tf]'."
    ) from None
  return tfds


def features(class_names: tuple[str, ...], multi_label: bool):
  """Returns the FeaturesDict: 'image', 'label' or 'labels', 'file_name'.

  Images stay as they are encoded, so that TFDS needs no TensorFlow to write them.
  """
  tfds = load_tfds()
  label = tfds.features.ClassLabel(names=list(class_names))
  return tfds.features.FeaturesDict(
    {
      'image': tfds.features.Image(),
      'labels' if multi_label else 'label': (
        tfds.features.Sequence(label) if multi_label else label
      ),
      'file_name': tfds.features.Text(),
    }
  )


def example(place: Place, data: bytes, multi_label: bool) -> dict:
  """Returns what `features` encodes; labels are names, which it numbers."""
  label = {'labels': list(place.labels)} if multi_label else {'label': place.labels[0]}
  return {'image': data, 'file_name': place.key, **label}


def facts(plan: Plan) -> dict:
  """Returns the arguments of DatasetInfo that are for people, and supervised_keys."""
  side = f' Longer sides are at most {plan.max_side} pixels.' if plan.max_side else ''
  return {
    'description': plan.description + side,
    'homepage': plan.homepage or None,
    'citation': plan.citation or None,
    'supervised_keys': None if plan.multi_label else ('image', 'label'),
  }
