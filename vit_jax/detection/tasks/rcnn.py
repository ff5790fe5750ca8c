"""Two-stage detection: proposals, then a class, a box and a mask for each region.

"Faster R-CNN", arXiv 1506.01497, section 3.1.2; "Mask R-CNN", arXiv 1703.06870, section 3;
"Cascade R-CNN", arXiv 1712.00726, section 4. Denominators are those of detectron2;
`regions.origins` lists the differences of other implementations.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from vit_jax.check import Factor
from vit_jax.detection import boxes
from vit_jax.detection.models.rcnn import sizes_of
from vit_jax.detection.regions import coding, masks
from vit_jax.detection.regions.origins import ORIGINS, Origin
from vit_jax.detection.tasks.detect import arguments

BoxLoss = Literal['l1', 'giou']


class RCNN:
  """The losses of proposals and of all stages of regions."""

  CLASSES = 'label'
  OUTPUTS = 'regions'
  OWN = None

  def __init__(
    self,
    model,
    spec: dict,
    *,
    box_loss: BoxLoss = 'l1',
    box_weight: Factor = 1.0,
    proposal_loss: BoxLoss = 'l1',
    proposal_weight: Factor = 1.0,
  ):
    """Builds the task from a two-stage detector and the spec of batches with boxes.

    Args:
      box_loss, proposal_loss: losses of the boxes of regions and of proposals. 'l1' is the L1
        of offsets, or smooth L1 if the model's `origin` has that; 'giou' is 1 - GIoU of boxes.
      box_weight, proposal_weight: weights of these losses.

    Raises:
      ValueError: batches have no boxes or classes, or no masks although the model predicts
        masks.
    """
    self.model = model
    core = model.untuned
    needed = ['boxes', 'boxes_mask', 'label'] + ['masks', 'extents'] * core.masks
    if missing := [name for name in needed if name not in spec]:
      have = {name: list(x.shape) for name, x in spec.items()}
      raise ValueError(
        f'rcnn needs {missing}: data with objects, such as digits_canvas, and a '
        'config.data.pp that ends in pad_to(boxes=N, label=N). Unless model.masks=False, it '
        'also needs data.source_options.masks=True and pad_to(..., masks=N, extents=N). '
        f'Batches: {have}'
      )
    self._options = dict(
      origin=ORIGINS[core.origin],
      nominal=core.anchor_sample,
      box_loss=box_loss,
      box_weight=box_weight,
      proposal_loss=proposal_loss,
      proposal_weight=proposal_weight,
    )

  def init(self, rng, spec: dict) -> dict:
    """Returns variables for batches of `spec`: {'image': ShapeDtypeStruct, ...}."""
    image = jnp.zeros((1, *spec['image'].shape[1:]), jnp.float32)
    return self.model.init(rng, image)

  def prepare(self, batch: dict, rng, state) -> dict:
    """Adds 'target' to a whole batch, before it is cut into micro-batches.

    Each example gets a random key of its own, given by its position in the whole batch. So
    the number of devices and micro-batches does not change which boxes are sampled.

    Args:
      batch: 'image' [B, H, W, C]; 'boxes' [B, N, 4], top, left, bottom, right as fractions
        of the image without its padding; 'label' int [B, N]; 'boxes_mask' [B, N], 1 for a
        box; 'weight' [B]; if images are padded 'image_mask' [B, H, W], 0 for padding; with
        masks also 'masks' [B, N, m, m] and 'extents' [B, N, 4], see
        `data.objects.encode_masks`.
      rng: random key of the samples.
    """
    size = sizes_of(batch['image'], batch.get('image_mask'))
    pixels = lambda x: boxes.swap_axes(x * jnp.tile(size, 2)[:, None])
    corners, weight = pixels(batch['boxes']), batch['weight']
    valid = (batch['boxes_mask'] > 0) & (weight > 0)[:, None]
    keys = jax.random.split(rng, len(weight))
    target = {
      'boxes': corners,
      'label': batch['label'],
      # Leave out boxes without an area: there is nothing to learn from them.
      'valid': valid & (coding.sides(corners) > 0).all(-1),
      'key': jax.random.key_data(keys),
      'weight': weight,
      'size': size,
    }
    if 'masks' in batch:
      target |= {'masks': batch['masks'], 'extents': pixels(batch['extents'])}
    return {**batch, 'target': target}

  def loss(self, variables, batch: dict, rng):
    """Returns (loss, (metrics, batch statistics)) of a prepared batch, see `losses`."""
    (outputs, _), updated = self.model.apply(
      variables,
      **arguments(batch),
      train=True,
      features=False,
      targets=batch['target'],
      rngs={'dropout': rng},
      mutable=['batch_stats'],
    )
    metrics = losses(outputs, batch['target'], **self._options)
    return metrics['loss'], (metrics, updated.get('batch_stats', {}))

  def predict(self, variables, batch: dict) -> dict:
    """Returns the detections and every named feature of the model, in evaluation."""
    outputs, out = self.model.apply(variables, **arguments(batch), train=False)
    return {**out, **outputs}


def losses(
  outputs: dict,
  targets: dict,
  *,
  origin: Origin,
  nominal: int,
  box_loss: BoxLoss = 'l1',
  box_weight: float = 1.0,
  proposal_loss: BoxLoss = 'l1',
  proposal_weight: float = 1.0,
) -> dict[str, jax.Array]:
  """Returns the loss of a batch and its parts.

  Denominators:
  - Losses of proposals are summed over the sampled anchors, and divided by the number of
    anchors to sample.
  - Losses of classes and boxes are divided by the number of sampled regions in the batch,
    over all devices, although only positive regions have a loss of boxes.
  - The loss of masks is divided by the number of positive regions.

  Each micro-batch has its own denominators, and counts by its number of images. So the
  total over micro-batches is exact if samples are full, as they almost always are; only
  the loss of masks is approximate.

  Args:
    outputs: 'rpn', 'stages' and, with masks, 'masks' of a model in training, see
      `models.rcnn`. Labels of anchors are 1, 0, or -1 if not sampled. Labels of regions are
      classes, or K for the background.
    targets: 'weight' [B], which sum to 1 over the whole batch and are 0 for images that do
      not count; for masks also 'masks' [B, N, h, w], 'extents' [B, N, 4] and 'size' [B, 2],
      see `regions.masks.targets`.
    nominal: number of anchors to sample from an image.
    box_loss, box_weight, proposal_loss, proposal_weight: see `RCNN`.

  Returns:
    'loss', the sum of all values below whose names begin with 'loss'.
    'loss_object' and 'loss_proposal', for classes and boxes of the RPN.
    'loss_class', 'loss_box' and 'loss_mask', sums over stages.
    'positives', the mean number of positive regions per image in the first stage.
  """
  weight = targets['weight']
  total = lambda x: jnp.sum(jnp.where(weight > 0, weight * x, 0))  # [B] -> []

  def mean_count(rows):
    """Returns the mean number of True in rows, bool [B, R], per image that counts."""
    number = total(rows.sum(1)) / jnp.maximum(weight.sum(), 1e-9)
    return jnp.maximum(number, 1e-9)

  def mean(x, rows):
    """Returns the mean of x [B, R] where rows is True, over the images that count."""
    return total(jnp.where(rows, x, 0).sum(1)) / mean_count(rows)

  def offsets(kind, deltas, rows, positive, beta, code):
    """Returns the losses [B, R] of boxes; rows that are not positive have 0."""
    if kind == 'giou':
      ours = coding.decode(deltas, rows['boxes'], code, origin.clamp_both)
      each = 1 - boxes.giou(ours, rows['target'])
    else:
      codes = coding.encode(rows['boxes'], rows['target'], code)
      each = smooth_l1(deltas.astype(jnp.float32) - codes, beta).sum(-1)
    return jnp.where(positive, each, 0)

  rpn = outputs['rpn']
  label = rpn['label']
  logits = rpn['logits'].astype(jnp.float32)
  objects = optax.sigmoid_binary_cross_entropy(logits, label == 1)
  rows, code, sampled = rpn['positives'], (1.0,) * 4, label >= 0
  anchors = offsets(
    proposal_loss, rows['deltas'], rows, rows['valid'], origin.rpn_beta, code
  )
  number = nominal if origin.nominal else mean_count(sampled)
  out = {
    'loss_object': total(jnp.where(sampled, objects, 0).sum(1)) / number,
    'loss_proposal': proposal_weight * total(anchors.sum(1)) / number,
    'loss_class': 0.0,
    'loss_box': 0.0,
  }

  stages = outputs['stages']
  factors = origin.stage_losses
  for factor, code, stage in zip(factors, origin.weights, stages, strict=False):
    label, valid = stage['label'], stage['valid']
    log = jax.nn.log_softmax(stage['logits'].astype(jnp.float32))
    classes = -jnp.take_along_axis(log, label[..., None], -1)[..., 0]
    positive = valid & (label < log.shape[-1] - 1)
    deltas = _select_class(stage['deltas'], label)
    each = offsets(box_loss, deltas, stage, positive, origin.box_beta, code)
    out['loss_class'] += factor * mean(classes, valid)
    out['loss_box'] += factor * box_weight * mean(each, valid)
  if outputs.get('masks'):
    out['loss_mask'] = 0.0
    for factor, rows in zip(factors, outputs['masks'], strict=False):
      expected = mask_targets(targets, rows, origin)
      logits = rows['logits'].astype(jnp.float32)
      each = optax.sigmoid_binary_cross_entropy(logits, expected).mean((2, 3))
      out['loss_mask'] += factor * mean(each, rows['valid'])
  background = stages[0]['logits'].shape[-1] - 1
  positive = stages[0]['valid'] & (stages[0]['label'] < background)
  return {**out, 'loss': sum(out.values()), 'positives': total(positive.sum(1))}


def mask_targets(targets: dict, rows: dict, origin: Origin) -> jax.Array:
  """Returns the targets of the regions' masks, float32 [B, M, m, m] from 0 to 1.

  Args:
    targets: 'masks', 'extents' and 'size', see `regions.masks.targets`.
    rows: the regions: 'boxes' [B, M, 4], 'index' int [B, M] and 'logits' [B, M, m, m].
  """
  bins = rows['logits'].shape[-1]
  cut = lambda *args: masks.targets(*args, bins, origin.aligned)
  parts = (targets['masks'], targets['extents'], rows['boxes'], rows['index'])
  shares = jax.vmap(cut)(*parts, targets['size'])
  return shares if origin.soft_masks else (shares >= 0.5).astype(jnp.float32)


def _select_class(deltas: jax.Array, label: jax.Array) -> jax.Array:
  """Selects the offsets [B, R, 4] of each row's class; the background gets those of any class.

  Args:
    deltas: [B, R, K, 4], a box for each class, or [B, R, 1, 4], one for all.
    label: int [B, R].
  """
  place = jnp.minimum(label, deltas.shape[2] - 1)
  return jnp.take_along_axis(deltas, place[..., None, None], 2)[:, :, 0]


def smooth_l1(x: jax.Array, beta: float) -> jax.Array:
  """Returns x^2 / (2 beta) if |x| < beta, else |x| - beta / 2. With beta 0, that is |x|."""
  if beta == 0:
    return jnp.abs(x)
  return beta * optax.huber_loss(x / beta)
