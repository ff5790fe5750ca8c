"""Draws figures of images: maps of where a model looks, and attention distances."""

import numpy as np

from vit_jax import explain, imagenet
from vit_jax.errors import UserError, did_you_mean
from vit_jax.explain import attention
from vit_jax.tools import predict, source
from vit_jax.tools.figures import Drawing, grids

# Maximum number of images in a figure, which is one page. The table has all images.
_MOST = 32

_TITLES = {
  'rollout': 'Attention',
  'attention': 'Attention',
  'class_rollout': 'Class rollout',
  'gradient': r'Gradient $\times$ input',
  'integrated': 'Integrated gradients',
}


def draw(args) -> Drawing:
  """Draws images beside their maps; `args.name` is the kind of map."""
  from vit_jax.explain import plots

  options, title = {}, _TITLES[args.name]
  if args.name == 'attention':
    options = {'layer': args.layer, 'head': args.head}
    layer = {'pooling': 'Pooling', -1: 'Last layer'}.get(args.layer)
    layer = layer or f'Layer {args.layer}'
    title = layer if args.head is None else f'{layer}, head {args.head}'
  paths = predict.find_images(args.images)
  loaded = source.load(args, dtype='float32')
  images = [str(path) for path in paths]
  rows = loaded.preprocess(images)
  names, captions = [''] * len(images), None
  if args.name in explain.OF_A_CLASS:
    options['classes'], names, captions = _choose_classes(loaded, rows, args.class_name)
  maps = explain.attention_maps(loaded, images, args.name, **options)
  signed = args.name in ('gradient', 'integrated')
  overlay = 'signed' if signed else args.overlay
  pixels = to_colours(loaded, rows[:_MOST])
  figure = plots.maps(pixels, maps[:_MOST], title, captions, overlay)
  cells = zip(images, names, strict=True)
  table = grids(('image', 'class'), list(zip(cells, maps, strict=True)))
  if signed:
    notes = ['Red pixels speak for the class that is named, blue ones against it.']
  else:
    notes = [_describe_clipping(images, maps, plots.TOP)]
  if len(images) > _MOST:
    notes.append(f'{_MOST} of {len(images)} images are drawn; the table has all.')
  return Drawing(figure, table, tuple(notes))


def _describe_clipping(images, maps, top: float) -> str:
  """Describes the patches beyond the colour scale, in the map where their share is largest."""
  above = [m[m > np.quantile(m, top)] for m in maps]
  shares = [high.sum() / (m.sum() or 1) for high, m in zip(above, maps, strict=True)]
  i = int(np.argmax(shares))
  return (
    f'Colours end at the {top:.0%} quantile of a map: {len(above[i])} of {maps[i].size} '
    f'patches of {images[i]} are above it and hold {shares[i]:.1%} of its sum.'
  )


def distance(args) -> Drawing:
  """Draws each head's mean attention distance (figures 7 right and 11)."""
  from vit_jax.explain import plots

  paths = [str(path) for path in predict.find_images(args.images)]
  loaded = source.load(args, dtype='float32')
  each = explain.attention_distances(loaded, paths)
  mean, std = each.mean(0), each.std(0)  # [L, M]
  patch = loaded.model.family.stride(loaded.model.fields())
  grid = tuple(n // p for n, p in zip(loaded.image_size, patch, strict=True))
  N = grid[0] * grid[1]
  even = np.full((1, 1, 1, N, N), 1 / N, np.float32)
  uniform = float(attention.attention_distance(even, grid, patch)[0, 0, 0])
  rows = [('layer', 'head', 'pixels', 'std_over_images', 'images')]
  for (layer, head), value in np.ndenumerate(mean):
    rows.append((layer, head, f'{value:.7g}', f'{std[layer, head]:.7g}', len(paths)))
  notes = (f'{len(paths)} images; uniform attention is {uniform:.1f} pixels.',)
  if len(paths) < 10:
    notes += ('The paper averages over 128 images; so few say little about a head.',)
  return Drawing(plots.heads(mean, std, uniform), rows, notes)


def _choose_classes(loaded, images, name: str | None) -> tuple:
  """Returns (numbers of the classes to explain, their names, captions with probabilities).

  Args:
    name: the name or number of one class for all images; None: the most probable class of
      each image.
  """
  logits = explain.predict_logits(loaded, images)
  numbers = logits.argmax(-1)
  if name is not None:
    numbers = np.full(len(images), _class(loaded, name))
  shares = np.exp(logits - logits.max(-1, keepdims=True))
  shares = (shares / shares.sum(-1, keepdims=True))[np.arange(len(numbers)), numbers]
  names = [_name(loaded, k) for k in numbers]
  captions = [f'{name}, {s:.0%}' for name, s in zip(names, shares, strict=True)]
  return numbers, names, captions


def to_colours(loaded, images):
  """Converts preprocessed images [B, H, W, C] to colours in [0, 1].

  The pipeline's outputs for black and for white images give the scale of each channel.
  """
  H, W, C = images.shape[1:]
  flat = lambda n: [np.full((n * H, n * W, C), level, np.uint8) for level in (0, 255)]
  try:
    # This is large enough unless the pipeline crops before it resizes.
    small = loaded.preprocess(flat(1))
  except UserError:
    small = loaded.preprocess(flat(2))
  black, white = small.mean((1, 2))
  span = np.where(white == black, 1, white - black)
  return np.clip((images - black) / span, 0, 1)


def _name(loaded, k: int) -> str:
  if not loaded.class_names:
    return f'class {k}'
  name = loaded.class_names[k]
  return imagenet.describe(name) or name


def _class(loaded, name: str) -> int:
  """Returns the number of the class that has this name or number."""
  names = list(loaded.class_names or [])
  described = [_name(loaded, k) for k in range(len(names))]
  for candidates in (names, described):
    if name in candidates:
      return candidates.index(name)
  K = getattr(loaded.model, 'num_classes', None) or 0
  if name.isdigit() and int(name) < K:
    return int(name)
  raise UserError(
    f'--class {name}: not a class of {loaded.source}. Expected 0 to {K - 1}'
    f'{" or a name" if names else ""}.{did_you_mean(name, described)}'
  )
