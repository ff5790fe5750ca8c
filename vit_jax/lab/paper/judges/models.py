"""Claims about the model as such."""

import functools

import numpy as np

from vit_jax.lab.paper.seen import Seen
from vit_jax.lab.paper.verdicts import DIGITS, NOT_SEEN, SEEN, percent


def works(seen: Seen):
  """How well the plain model classifies."""
  top1 = seen.last('digits', 'test/top1')
  return (
    SEEN if top1 > 0.97 else NOT_SEEN,
    f'{percent(top1)} of {DIGITS} handwritten digits that it was not trained on, cut into '
    '16 patches, are classified correctly. The paper means data sets such as ImageNet.',
  )


def sizes(seen: Seen):
  """Parameters of Table 1, from our models."""
  import jax

  from vit_jax import models

  millions = {}
  for name, classes in (('B/16', None), ('L/32', 1000), ('H/14', 1000)):
    model = models.build('vit', name, scan=True, num_classes=classes)
    shapes = models.shapes_of(model, (224, 224, 3))
    millions[name] = sum(x.size for x in jax.tree.leaves(shapes)) / 1e6
  right = [round(n) for n in millions.values()] == [86, 307, 632]
  return SEEN if right else NOT_SEEN, (
    'Million parameters here: '
    + ', '.join(f'{name} {n:.1f}' for name, n in millions.items())
    + ' (B/16 without a head, the others for 1,000 classes). Exact, at full scale.'
  )


def no_order_of_its_own(seen: Seen):
  """Features of shuffled patches, with and without positions."""
  without, with_them = _changes_by_shuffling()
  return SEEN if without < 1e-5 < with_them else NOT_SEEN, (
    'Shuffling the patches changes the pooled features of a model without position '
    f'embeddings by at most {without:.0e}, which is rounding, and those of an untrained '
    f'model with them by {with_them:.2f}. Exact, at any scale.'
  )


@functools.cache  # the page is written after every experiment
def _changes_by_shuffling() -> tuple[float, float]:
  """Returns the largest change of a feature without and with position embeddings."""
  import jax

  from vit_jax import models

  rng = np.random.default_rng(0)
  patches = rng.standard_normal((16, 8, 8, 3)).astype(np.float32)
  image = lambda order: (
    patches[order].reshape(4, 4, 8, 8, 3).swapaxes(1, 2).reshape(1, 32, 32, 3)
  )
  orders = np.arange(16), rng.permutation(16)
  changes = []
  for posemb in ('none', 'learn'):
    model = models.build('vit', 'mu/8', depth=2, classifier='gap', posemb=posemb)
    variables = jax.jit(model.init)(jax.random.key(0), image(orders[0]))
    run = functools.partial(jax.jit(model.apply), variables)
    a, b = (run(image(order))[1]['pre_logits'] for order in orders)
    changes.append(float(np.abs(a - b).max()))
  return tuple(changes)
