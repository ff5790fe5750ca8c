"""The model that a figure is of."""


def opened(args, **options):
  """Returns `pretrained.Loaded` of what the command line says; computes in float32."""
  import dataclasses

  from vit_jax import pretrained

  loaded = pretrained.load(
    args.source,
    variant=args.variant,
    image_size=args.resolution,
    ema=args.ema,
    weights=args.weights,
    **options,
  )
  return dataclasses.replace(loaded, model=loaded.model.clone(dtype='float32'))
