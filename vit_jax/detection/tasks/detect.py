"""Detection as set prediction: DETR, arXiv 2005.12872, sections 3.1 and A.4.

A detector returns {'logits': [B, Q, K+1], 'boxes': [B, Q, 4]}. The last class is "no
object". A box is centre x, centre y, width and height, as fractions of the image without
its padding.
"""

import jax
import jax.numpy as jnp

from vit_jax.check import Factor, Fraction
from vit_jax.detection import boxes
from vit_jax.detection.tasks.matching import match

# The paper's weights, section A.4.
L1, GIOU, NO_OBJECT = 5.0, 2.0, 0.1


class Detect:
  """DETR's set loss, summed over all layers of the decoder."""

  CLASSES = 'label'
  OUTPUTS = 'boxes'
  OWN = None

  def __init__(
    self,
    model,
    spec: dict,
    *,
    l1: Factor = L1,
    giou: Factor = GIOU,
    no_object: Fraction = NO_OBJECT,
  ):
    """Builds the task from a detector and the spec of batches with boxes.

    Args:
      l1, giou: weights of the two losses of boxes, and of the two costs in the matching.
        The loss and the cost of classes have the weight 1.
      no_object: weight of queries without an object in the loss of classes.

    Raises:
      ValueError: batches have no boxes or no classes, or an image may have more boxes than
        the model has queries.
    """
    shape = tuple(spec['boxes'].shape[1:]) if 'boxes' in spec else ()
    label = tuple(spec['label'].shape[1:]) if 'label' in spec else ()
    if len(shape) != 2 or label != shape[:1] or 'boxes_mask' not in spec:
      have = {name: list(x.shape) for name, x in spec.items()}
      raise ValueError(
        'detect needs boxes [B, N, 4] and labels [B, N]: data with boxes, such as '
        'digits_canvas, and a config.data.pp that ends in pad_to(boxes=N, label=N). '
        f'Batches: {have}'
      )
    queries = getattr(model, 'num_queries', shape[0])
    if shape[0] > queries:
      raise ValueError(
        f'{shape[0]} boxes for each image, but the model has {queries} queries: let '
        f'config.data.pp end in pad_to(boxes=N, label=N) with N at most {queries}'
      )
    self.model = model
    self._weights = {'l1': l1, 'giou': giou, 'no_object': no_object}

  def init(self, rng, spec: dict) -> dict:
    """Returns variables for batches of `spec`: {'image': ShapeDtypeStruct, ...}."""
    image = jnp.zeros((1, *spec['image'].shape[1:]), jnp.float32)
    return self.model.init(rng, image)

  def prepare(self, batch: dict, rng, state) -> dict:
    """Adds 'target' to a whole batch, before it is cut into micro-batches.

    Losses are divided by the number of boxes in the whole batch, over all devices and
    micro-batches.

    Args:
      batch: 'image' [B, H, W, C]; 'boxes' [B, N, 4], top, left, bottom, right as fractions;
        'label' int [B, N]; 'boxes_mask' [B, N], 1 for a box; 'weight' [B]; and if images
        are padded 'image_mask' [B, H, W], 0 for padding.
    """
    del rng, state
    weight = batch['weight']
    valid = (batch['boxes_mask'] > 0) & (weight > 0)[:, None]
    target = {
      'boxes': boxes.to_centres(boxes.swap_axes(batch['boxes'])),
      'label': batch['label'],
      'valid': valid,
      'weight': weight,
      'mean_number': jnp.full_like(weight, jnp.sum(weight * valid.sum(-1))),
    }
    return {**batch, 'target': target}

  def loss(self, variables, batch: dict, rng):
    """Returns (loss, (metrics, batch statistics)) of a prepared batch.

    Metrics are those of the last layer, but 'loss' is the sum over all layers.
    """
    (outputs, out), updated = self.model.apply(
      variables,
      **arguments(batch),
      train=True,
      rngs={'dropout': rng},
      mutable=['batch_stats'],
    )
    aux = {key: out[key] for key in ('aux_logits', 'aux_boxes') if key in out}
    metrics = losses(outputs | aux, batch['target'], **self._weights)
    metrics |= {name: x[-1] for name, x in metrics.items() if x.ndim}
    return metrics['loss'], (metrics, updated.get('batch_stats', {}))

  def predict(self, variables, batch: dict) -> dict:
    """Returns 'logits', 'boxes' and every named feature of the model, in evaluation."""
    outputs, out = self.model.apply(variables, **arguments(batch), train=False)
    return {**out, **outputs}


def costs(
  outputs: dict, targets: dict, *, l1: float = L1, giou: float = GIOU
) -> jax.Array:
  """Returns the cost [..., Q, N] of matching each query with each target.

  It is -p + l1 * distance - giou * overlap: the probability of the target's class, the L1
  distance of the boxes and their generalised IoU (section 3.1, equation 2).

  Args:
    outputs: 'logits' [..., B, Q, K+1] and 'boxes' [..., B, Q, 4].
    targets: 'label' int [B, N] and 'boxes' [B, N, 4].
    l1, giou: see `Detect`.
  """
  likely = jax.nn.softmax(outputs['logits'].astype(jnp.float32))
  label = jnp.broadcast_to(
    targets['label'][:, None], (*likely.shape[:-1], targets['label'].shape[-1])
  )
  likely = jnp.take_along_axis(likely, label, -1)  # [..., Q, N]
  ours, theirs = outputs['boxes'][..., :, None, :], targets['boxes'][:, None]
  distance = jnp.abs(ours - theirs).sum(-1)
  overlap = boxes.giou(boxes.to_corners(ours), boxes.to_corners(theirs))
  return -likely + l1 * distance - giou * overlap


def losses(
  outputs: dict,
  targets: dict,
  *,
  l1: float = L1,
  giou: float = GIOU,
  no_object: float = NO_OBJECT,
) -> dict[str, jax.Array]:
  """Returns the set loss of a batch and its parts.

  Args:
    outputs: 'logits' [B, Q, K+1] and 'boxes' [B, Q, 4] of the last layer; optionally
      'aux_logits' [L-1, B, Q, K+1] and 'aux_boxes' [L-1, B, Q, 4] of the layers before it.
      Each layer is matched on its own.
    targets: 'label' int [B, N]; 'boxes' [B, N, 4], centres; 'valid' [B, N], 0 for padding. A
      part of a batch also has 'weight' [B], the images' weights, which sum to 1 over the
      whole batch, and 'mean_number' [B], the mean number of boxes in the whole batch.
    l1, giou, no_object: see `Detect`.

  Returns:
    'loss', the sum over layers of loss_ce + l1 loss_bbox + giou loss_giou.
    'loss_ce' [L], by layer: the weighted mean over queries of the loss of classes.
    'loss_bbox' and 'loss_giou' [L]: means over boxes.
    'cardinality_error' [L]: |queries with an object - boxes|, a mean over images.
    'class_error': the percentage of boxes that the last layer classifies wrongly; 100 for a
    batch without boxes, as in the original code.
  """
  label, valid = targets['label'], targets['valid'] > 0
  every = {
    name: jnp.concatenate(
      [
        *([outputs[aux]] if (aux := f'aux_{name}') in outputs else []),
        outputs[name][None],
      ]
    ).astype(jnp.float32)
    for name in ('logits', 'boxes')
  }
  L, B, Q, K = every['logits'].shape
  K -= 1
  weight = targets.get('weight', jnp.full(B, 1 / B))
  mean_number = targets.get('mean_number', jnp.full(B, jnp.sum(valid) / B))
  over_batch = lambda x: jnp.sum(weight * x, -1)  # [..., B] -> [...]
  some = jnp.where(mean_number > 0, mean_number, 1)
  per_box = lambda x: over_batch(x / some)

  cost = jnp.moveaxis(costs(every, targets, l1=l1, giou=giou), 0, 1)  # [B, L, Q, N]
  query = match(cost, jnp.repeat(valid[:, None], L, 1))
  query = jnp.moveaxis(query, 1, 0)  # [L, B, N]
  # [L, B, N, Q], zeros for a target without a query.
  pairs = jax.nn.one_hot(query, Q)
  has_object = pairs.sum(-2) > 0  # [L, B, Q]
  # Use 'highest', because a TPU would round labels above 256 to bfloat16.
  classes = jnp.einsum('lbnq,bn->lbq', pairs, label, precision='highest')
  classes = jnp.where(has_object, classes, K).astype(jnp.int32)
  log = jax.nn.log_softmax(every['logits'])
  ce = -jnp.take_along_axis(log, classes[..., None], -1)[..., 0]
  ce = (ce * jnp.where(has_object, 1, no_object)).sum(-1)  # [L, B]
  # Sum of the weights of an image's queries.
  total = mean_number + no_object * (Q - mean_number)

  ours = jnp.take_along_axis(every['boxes'], query[..., None] % Q, -2)  # [L, B, N, 4]
  over_pairs = lambda x: jnp.where(query >= 0, x, 0).sum(-1)
  distance = jnp.abs(ours - targets['boxes']).sum(-1)
  overlap = boxes.giou(boxes.to_corners(ours), boxes.to_corners(targets['boxes']))
  out = {
    'loss_ce': over_batch(ce / jnp.where(total > 0, total, 1)),
    'loss_bbox': per_box(over_pairs(distance)),
    'loss_giou': per_box(over_pairs(1 - overlap)),
  }
  out['loss'] = jnp.sum(
    out['loss_ce'] + l1 * out['loss_bbox'] + giou * out['loss_giou']
  )
  guess = every['logits'].argmax(-1)
  number = (guess < K).sum(-1)
  out['cardinality_error'] = over_batch(jnp.abs(number - valid.sum(-1)))
  right = (has_object & (guess == classes)).sum(-1)
  wrong = (valid.sum(-1) - right[-1]) / some
  out['class_error'] = 100 * over_batch(jnp.where(mean_number > 0, wrong, 1))
  return out


def arguments(batch: dict) -> dict:
  """Returns the arguments of a detector: 'images', and 'mask' if images are padded.

  Args:
    batch: 'image' [B, H, W, C]; if images are padded 'image_mask' [B, H, W], 0 for padding.
  """
  images = batch['image']
  if 'image_mask' not in batch:
    return {'images': images}
  mask = batch['image_mask'] > 0
  # An image that could not be read is all padding. Attention to nothing would give NaN, and
  # NaN times the image's weight of 0 is NaN: treat all its pixels as shown.
  mask |= ~mask.any((1, 2), keepdims=True)
  # Set padding to 0, as the reference code does: value_range may have made it nonzero.
  return {'images': images * mask[..., None], 'mask': mask}
