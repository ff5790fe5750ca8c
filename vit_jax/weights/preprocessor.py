"""An evaluation pipeline as timm and transformers describe theirs."""

from typing import NamedTuple

from vit_jax.data.ops import registry
from vit_jax.weights import hints

_NUMBERS = {method: number for number, method in hints.RESAMPLE.items()}


class Preprocessor(NamedTuple):
  """Resize, crop, standardise: what both libraries do before a model.

  Attributes:
    size: (H, W) in pixels of the model's images.
    shorter: pixels of the shorter side before a central crop; None: resized to `size`,
      the aspect ratio not kept.
    method: of resizing, one of `hints.RESAMPLE`.
    longest: None, or what the longer side is at most, of detectors: no crop, and images of
      a batch are padded.
    mean, std: of each channel, of pixels in [0, 1].
  """

  size: tuple[int, int]
  shorter: int | None
  method: str
  mean: tuple[float, ...]
  std: tuple[float, ...]
  longest: int | None = None

  def timm(self) -> dict:
    """Returns the keys of timm's `pretrained_cfg` that describe it."""
    return {
      'input_size': [3, *self.size],
      'interpolation': self.method,
      'crop_pct': round(max(self.size) / self.shorter, 6) if self.shorter else 1.0,
      'crop_mode': 'center' if self.shorter else 'squash',
      'mean': list(self.mean),
      'std': list(self.std),
    }

  def hf(self) -> dict:
    """Returns transformers' preprocessor_config.json that describes it."""
    height, width = self.size
    size = whole = {'height': height, 'width': width}
    name, more = 'ViTImageProcessor', {}
    if self.longest:
      size = {'shortest_edge': self.shorter, 'longest_edge': self.longest}
      name, more = 'DetrImageProcessor', {'do_pad': True}
    elif self.shorter:
      size = {'shortest_edge': self.shorter}
      name, more = 'CLIPImageProcessor', {'do_center_crop': True, 'crop_size': whole}
    return {
      'image_processor_type': name,
      'do_convert_rgb': True,
      'do_resize': True,
      'size': size,
      'resample': _NUMBERS[self.method],
      **more,
      'do_rescale': True,
      'rescale_factor': 1 / 255,
      'do_normalize': True,
      'image_mean': list(self.mean),
      'image_std': list(self.std),
    }


def of(pp: str) -> Preprocessor | None:
  """Returns a pipeline as they describe theirs; None for one that they cannot express.

  Both round after resizing and always antialias, which the description leaves out: a
  pipeline of ours that does not is described as if it did.
  """
  ops = [op for op in registry.parse(pp) if op.name not in ('decode', 'pad_to')]
  names = [op.name for op in ops]
  if names not in (
    ['resize', 'value_range'],
    ['resize_small', 'central_crop', 'value_range'],
    ['detr_resize', 'canvas', 'value_range'],
  ):
    return None
  resize, levels = ops[0].arguments, ops[-1].arguments
  usual = {'in_lo': 0, 'in_hi': 255, 'clip': False}
  if isinstance(resize.get('sizes'), tuple):  # one is drawn
    return None
  method = resize.get('method', 'bilinear')  # the one of detr_resize
  if method not in _NUMBERS or any(levels[k] != v for k, v in usual.items()):
    return None
  size = ops[-2].arguments['size']
  mean, std = [], []
  for low, high in zip(_three(levels['lo']), _three(levels['hi']), strict=True):
    std.append(round(1 / (high - low), 7))
    mean.append(round(-low / (high - low), 7))
  return Preprocessor(
    (size, size) if isinstance(size, int) else tuple(size),
    resize.get('smaller_size', resize.get('sizes')),
    method,
    tuple(mean),
    tuple(std),
    resize.get('longest'),
  )


def _three(value) -> tuple[float, ...]:
  return (value,) * 3 if isinstance(value, int | float) else tuple(value)
