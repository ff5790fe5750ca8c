"""The model that a figure is of."""

import dataclasses

from vit_jax import pretrained


def opened(args):
  """Returns `pretrained.Loaded` of what the command line says; computes in float32."""
  loaded = pretrained.load(
    args.source,
    variant=args.variant,
    image_size=args.resolution,
    ema=args.ema,
    weights=args.weights,
  )
  return dataclasses.replace(loaded, model=loaded.model.clone(dtype='float32'))
