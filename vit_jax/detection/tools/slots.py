"""The figure `slots`: where each query of a detector predicts boxes."""

import numpy as np

from vit_jax.detection.tools import evaluate_boxes
from vit_jax.errors import UserError
from vit_jax.explain import slots
from vit_jax.tools import evaluate, source
from vit_jax.tools.figures.drawn import Drawn

_SHARE = 0.05  # the share of boxes called small, and the share called large


def draw(args) -> Drawn:
  """Draws the boxes that each query predicts on all images (DETR, figure 7)."""
  import jax

  from vit_jax.explain import plots

  _, section = evaluate.evaluation(args)
  loaded = source.load(args)
  evaluator, predict, variables = evaluate_boxes.opened(args, loaded, section['data'])
  with jax.set_mesh(evaluator.mesh):
    answers = evaluator.detect(predict, variables)
  number, Q = answers['scores'].shape
  if not number:
    raise UserError(f'None of {evaluator.batches.num_examples:,} images could be read.')
  low, high = np.split(answers['boxes'].astype(np.float64), 2, -1)  # [n, Q, 2]
  centres, sizes = (low + high) / 2, high - low
  shown = range(min(args.count, Q))
  sides = np.sqrt(np.maximum(sizes, 0).prod(-1))
  small, large = np.quantile(sides, [_SHARE, 1 - _SHARE])
  colours = slots.slot_colours(sizes, small, max(large, small + 1e-6))
  figure = plots.slots([(centres[:, q], colours[:, q]) for q in shown])
  rows = [('query', 'image', 'x', 'y', 'width', 'height', 'class', 'score')]
  for q in shown:
    for i in range(number):
      box = (f'{x:.6g}' for x in (*centres[i, q], *sizes[i, q]))
      score = f'{answers["scores"][i, q]:.6g}'
      rows.append((q, answers['index'][i], *box, answers['labels'][i, q], score))
  data = section['data']
  return Drawn(
    figure,
    rows,
    (
      f'The first {len(shown)} of {Q} queries; all boxes of {number:,} images of '
      f'{data["source"]}, {data["split"]}, whatever their score.',
      f'Small boxes have at most the area of a square with side {small:.2f}, large ones at '
      f'least that of side {large:.2f}, as fractions of the image. In between, green turns '
      'to red or blue.',
    ),
  )
