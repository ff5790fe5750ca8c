"""Two-stage detectors: Faster, Mask and Cascade R-CNN on the maps of a pyramid.

arXiv 1506.01497, 1703.06870 and 1712.00726. The region proposal network finds boxes that may
hold an object. Heads pool features inside these boxes, classify and move them, and predict
masks. All shapes are static: lists of boxes are padded, and `valid` marks the real ones.
"""

import functools
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from vit_jax.check import Count, Fraction, Range
from vit_jax.detection import boxes as overlaps
from vit_jax.detection.models import fpn, pyramid, roi_heads
from vit_jax.detection.regions import anchors, assign, coding, suppression
from vit_jax.detection.regions.origins import ORIGINS
from vit_jax.detection.regions.roi_align import level_of, roi_align
from vit_jax.errors import UserError
from vit_jax.models.base import Family, Model

# Sides of the pooled features, for the box heads and the mask heads.
BOX_BINS, MASK_BINS = 7, 14

# The papers' ResNets, with frozen norms. DC5 has no pyramid, but a dilated last stage.
VARIANTS = {f'R{n}-{kind}': (n, kind) for n in ('50', '101') for kind in ('FPN', 'DC5')}


def variant(name: str) -> dict:
  """Returns the fields of 'R50-FPN', 'R101-DC5', ..., or of a model on a pyramid 'sfp:B'."""
  if name not in VARIANTS:
    return dict(backbone={'name': name})
  layers, kind = VARIANTS[name]
  if kind == 'FPN':
    return dict(backbone=dict(name='fpn', backbone=_resnet(layers)))
  resnet = _resnet(layers, output_stride=16)
  return dict(backbone=resnet, anchor_sizes=DC5['anchor_sizes'])


class RCNN(Model):
  """Faster, Mask or Cascade R-CNN. `variant` sets `backbone`, and perhaps `anchor_sizes`."""

  # A pyramid, or a backbone such as a ResNet, whose last stage is the only map.
  backbone: nn.Module | None = None
  num_classes: Count = 80  # number of classes, not counting the background
  # The implementation that the model follows in its details, see `regions.origins`.
  origin: Literal[tuple(ORIGINS)] = 'detectron2'
  # Sides in pixels of square anchors, for each level, the finest first.
  anchor_sizes: Sequence[Sequence[float]] = ((32,), (64,), (128,), (256,), (512,))
  ratios: Sequence[float] = (0.5, 1.0, 2.0)  # heights of anchors divided by widths
  rpn_convs: Literal[1, 2] = 1
  head: roi_heads.Head = '2fc'
  # Norm after each convolution of box heads, and of mask heads.
  head_norm: Literal[pyramid.NORMS] = 'none'
  mask_norm: Literal[pyramid.NORMS] = 'none'
  conv_width: Count = 256  # channels of the convolutions in box and mask heads
  fc_width: Count = 1024
  mask_convs: Annotated[int, Range(0, 100)] = 4  # number of convolutions in mask heads
  mask_width: Count | None = None  # their channels; None: `conv_width`
  # whether to predict masks, as Mask R-CNN does and Faster R-CNN does not
  masks: bool = True
  # Minimum IoU with a target that makes a box positive, for each box stage. Three stages,
  # (0.5, 0.6, 0.7), are Cascade R-CNN.
  overlaps: Sequence[Fraction] = (0.5,)
  class_agnostic: bool = False  # whether all classes share one box
  class_agnostic_masks: bool = False  # whether all classes share one mask
  # Samples of RoIAlign along each axis of a bin. 0: one per cell that the bin covers.
  samples: Literal[0, 2] = 0
  # (side, level): boxes of this side, in pixels, belong to this level of the pyramid.
  canonical: tuple[int, int] = (224, 4)
  # Maximum number of proposals: per level before suppression, and in total after it. Both are
  # (in training, in evaluation).
  before: tuple[Count, Count] = (2000, 1000)
  after: tuple[Count, Count] = (1000, 1000)
  # Anchors per image that train the RPN; at most half of them are positive.
  anchor_sample: Count = 256
  # Boxes per image that train the heads; at most a quarter of them are positive.
  box_sample: Count = 512
  least_score: Fraction = 0.05  # detections must have a higher score
  # A detection suppresses others of its class with a lower score and an IoU above this.
  suppress: Fraction = 0.5
  soft_nms: bool = False  # whether suppression is linear soft-NMS, arXiv 1704.04503
  most: Count = 100  # maximum number of detections per image
  # Dtype of convolutions and heads, and of a backbone that does not set one. Boxes, logits
  # and all parameters are float32.
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self, images, mask=None, targets=None, *, train: bool = False, features: bool = True
  ):
    """Finds objects in images of any size.

    Args:
      images: [B, H, W, C], standardised, 0 in padding.
      mask: bool or 0/1 [B, H, W], 0 for padding, which lies to the right of an image and
        below it. None: no padding.
      targets: the objects to train on: 'boxes' [B, N, 4], left, top, right, bottom in
        pixels; 'label' int [B, N]; 'valid' bool [B, N], False for padding; and 'key' uint32
        [B, 2], a random key for each example. Random numbers may be given instead of a key:
        'rpn_priority' [B, anchors] and 'roi_priority' [stages, B, candidates].
      train: whether the backbone applies stochastic depth, which needs the 'dropout' rng.
      features: whether the caller reads `out`.

    Returns:
      Without targets, (detections, out): 'boxes' [B, D, 4], left, top, right, bottom as
      fractions of the image without its padding; 'scores' [B, D]; 'labels' int [B, D];
      'valid' bool [B, D]; and 'masks' [B, D, 28, 28], probabilities. 'grow' bool [B, D] is
      there only for masks that grow before `regions.masks.paste` draws them. `out` has
      maps, proposals and the outputs of all stages.
      With targets, ({'rpn': ..., 'stages': [...], 'masks': [...]}, out), as
      `tasks.rcnn.losses` reads it; see `_train`.
    """
    if self.backbone is None:
      raise UserError(
        f"An rcnn needs a pyramid: a size of {list(VARIANTS)}, such as 'rcnn:R50-FPN', "
        "or backbone={'name': 'fpn', ...}."
      )
    maps, out = self._maps(images, train)
    strides = [images.shape[1] / x.shape[1] for x in maps]
    # The nearest power of 2, because an image's side may not be a multiple of the stride.
    strides = [2 ** round(math.log2(stride)) for stride in strides]
    sizes = sizes_of(images, mask)
    every = self._anchors(images.shape[1:3], maps, strides)
    A = len(self.ratios) * len(self.anchor_sizes[0])
    logits, deltas = roi_heads.RPN(self.rpn_convs, A, self.dtype, name='rpn')(maps)
    proposals = self._proposals(logits, deltas, every, sizes, train)
    rpn = {'logits': jnp.concatenate(logits, 1), 'deltas': jnp.concatenate(deltas, 1)}
    out |= {f'rpn_{key}': x for key, x in rpn.items()}
    out |= {f'proposal_{key}': x for key, x in proposals.items()}
    # The extra level of a pyramid serves proposals only: nothing is pooled from it.
    pooled = max(len(maps) - getattr(self.backbone, 'extra_level', False), 1)
    source = maps[:pooled], strides[:pooled]
    if targets is None:
      outputs, more = self._detect(source, sizes, proposals, train)
    else:
      every = jnp.concatenate(every)
      rpn |= self._label_anchors(every, rpn['deltas'], sizes, targets)
      outputs, more = self._train(source, sizes, proposals, targets)
      outputs['rpn'] = rpn
    return outputs, {**out, **more} if features else {}

  # -- the first stage ----------------------------------------------------------------

  def _maps(self, images, train: bool) -> tuple[list[jax.Array], dict]:
    """Returns the maps, the finest first, and the features of the backbone."""
    if isinstance(self.backbone, pyramid.Pyramid):
      maps, out = self.backbone(images, train=train)
      maps = list(maps.values())
    else:
      named, out = pyramid.maps_of(self.backbone, images, train=train)
      maps = [x for name, x in named.items() if name.startswith('stage')][-1:]
    if len(maps) != len(self.anchor_sizes):
      raise UserError(
        f'anchor_sizes has {len(self.anchor_sizes)} levels, but the backbone '
        f'{type(self.backbone).__name__} has {len(maps)} maps: give one tuple of sizes '
        'for each map.'
      )
    return maps, dict(out)

  def _anchors(self, size, maps, strides) -> list[jax.Array]:
    """Returns the anchors [h w A, 4] of each level."""
    origin, levels = ORIGINS[self.origin], []
    for x, stride, sides in zip(maps, strides, self.anchor_sizes, strict=True):
      grid, steps = x.shape[1:3], (stride,) * 2
      if origin.rounded_strides:
        steps = tuple(n // m for n, m in zip(size, grid, strict=True))
      cell = anchors.cell(sides, self.ratios, origin.rounded_anchors)
      levels.append(anchors.anchors(grid, steps, cell))
    return levels

  def _proposals(self, logits, deltas, every, sizes, train: bool) -> dict:
    """Proposes boxes: 'boxes' [B, P, 4], 'logits' and 'valid' [B, P], without gradient."""
    origin = ORIGINS[self.origin]
    propose = functools.partial(
      suppression.proposals,
      before=self.before[not train],
      after=self.after[not train],
      least=origin.least_side,
      clamp_both=origin.clamp_both,
    )
    logits, deltas = jax.lax.stop_gradient((logits, deltas))
    return jax.vmap(propose, (0, 0, None, 0))(logits, deltas, every, sizes)

  def _label_anchors(self, every: jax.Array, deltas, sizes, targets: dict) -> dict:
    """Samples anchors; returns a dict with 'label' and 'positives'.

    'label' is int [B, A], -1 for anchors that are not sampled. 'positives' are the sampled
    anchors with a target: 'boxes' and 'target' [B, P, 4], 'valid' bool [B, P], and the
    predicted offsets 'deltas' [B, P, 4]. Only their targets are gathered, because gathering
    for all anchors would take a TPU as long as RoIAlign.
    """
    origin = ORIGINS[self.origin]
    priority = self._priority(targets, 'rpn_priority', 0, len(every))

    def one(boxes, valid, size, priority, deltas):
      iou = overlaps.iou(boxes[:, None], every[None])
      inside = True
      if origin.inside_only:
        inside = (every[:, :2] >= 0).all(1) & (every[:, 2:] < size[::-1]).all(1)
        iou = jnp.where(inside, iou, -1.0)
      index, label = assign.match(iou, valid, 0.3, 0.7, origin.low_quality)
      label = jnp.where(inside, label, -1)
      most = self.anchor_sample // 2
      drawn = assign.sample(priority, label, self.anchor_sample, most)
      first = drawn.index[: max(most, 1)]  # positives come first
      positives = {
        'boxes': every[first],
        'target': boxes[index[first]],
        'valid': drawn.positive[: len(first)],
        'deltas': deltas[first],
      }
      return {
        'label': assign.labels_of_sample(drawn, len(label)),
        'positives': positives,
      }

    args = targets['boxes'], targets['valid'], sizes, priority
    return jax.vmap(one)(*args, deltas)

  def _priority(self, targets: dict, name: str, stage: int, number: int) -> jax.Array:
    """Draws float32 [B, number], uniformly random, from each example's own key."""
    if name in targets:
      return targets[name]
    keys = jax.random.wrap_key_data(targets['key'])
    draw = lambda key: jax.random.uniform(jax.random.fold_in(key, stage), (number,))
    return jax.vmap(draw)(keys)

  # -- the second stage ---------------------------------------------------------------

  def _pool(self, source, boxes, bins: int) -> jax.Array:
    """Pools the features [B, R, bins, bins, C] inside boxes [B, R, 4]."""
    maps, strides = source
    if self.is_initializing():
      # Parameters do not depend on features, and this saves seconds of tracing.
      return jnp.zeros((*boxes.shape[:2], bins, bins, maps[0].shape[-1]), maps[0].dtype)
    first = int(math.log2(strides[0]))
    last = first + len(maps) - 1
    levels = level_of(boxes, first, last, self.canonical, self.origin)
    aligned = ORIGINS[self.origin].aligned
    return roi_align(maps, boxes, strides, bins, self.samples, aligned, levels)

  def _box_heads(self) -> list[nn.Module]:
    return [
      roi_heads.BoxHead(
        self.head,
        self.head_norm,
        self.conv_width,
        self.fc_width,
        self.num_classes,
        self.class_agnostic,
        self.dtype,
        name=f'box_head{i}',
      )
      for i in range(len(self.overlaps))
    ]

  def _mask_heads(self) -> list[nn.Module]:
    """Makes one mask head, or one per stage if the implementation has several."""
    number = len(self.overlaps) if ORIGINS[self.origin].resampled else 1
    masks = 1 if self.class_agnostic_masks else self.num_classes
    args = self.mask_norm, self.mask_width or self.conv_width, masks, self.dtype
    return [
      roi_heads.MaskHead(self.mask_convs, *args, name=f'mask_head{i}')
      for i in range(number if self.masks else 0)
    ]

  def _move(self, stage: int, boxes, logits, deltas, sizes, label=None) -> jax.Array:
    """Moves a stage's boxes [B, R, 4] by its offsets, without gradient.

    Args:
      boxes, logits, deltas: the stage's boxes and outputs.
      sizes: [B, 2], heights and widths of the images.
      label: int [B, R], the classes in training, where K is the background. A box of the
        background moves by the offsets of its likeliest class.
    """
    origin, K = ORIGINS[self.origin], self.num_classes
    chosen = (
      logits[..., :K].argmax(-1) if not self.class_agnostic else 0 * logits[..., 0]
    )
    if label is not None and not self.class_agnostic:
      chosen = jnp.where(label < K, label, chosen)
    chosen = chosen.astype(jnp.int32)[..., None, None]
    deltas = jnp.take_along_axis(deltas, chosen, 2)[:, :, 0]
    moved = coding.decode(deltas, boxes, origin.weights[stage], origin.clamp_both)
    return jax.lax.stop_gradient(jax.vmap(coding.clip)(moved, sizes))

  def _detect(self, source, sizes, proposals: dict, train: bool) -> tuple[dict, dict]:
    origin, K, out = ORIGINS[self.origin], self.num_classes, {}
    boxes, every = proposals['boxes'], []
    stages = self._box_heads()
    for i, head in enumerate(stages):
      pooled = self._pool(source, boxes, BOX_BINS)
      logits, deltas = head(pooled, train=train)
      every.append(logits)
      out |= {f'stage_boxes_{i}': boxes, f'box_logits_{i}': logits}
      out |= {f'box_deltas_{i}': deltas, f'box_pooled_{i}': pooled}
      if i + 1 < len(stages):
        boxes = self._move(i, boxes, logits, deltas, sizes)
    if origin.mean_of_logits:
      likely = jax.nn.softmax(sum(every) / len(every))[..., :K]
    else:
      likely = sum(jax.nn.softmax(x)[..., :K] for x in every) / len(every)
    weights = origin.weights[len(stages) - 1]
    boxes = coding.decode(deltas, boxes[:, :, None], weights, origin.clamp_both)

    select = functools.partial(
      suppression.detections,
      least=self.least_score,
      threshold=self.suppress,
      most=self.most,
      soft=self.soft_nms,
    )
    detections = jax.vmap(select)(boxes, likely, proposals['valid'], sizes)
    boxes = detections.pop('boxes')
    out |= {'pixel_boxes': boxes, 'complete': detections.pop('complete')}
    out['rows'] = detections.pop('rows')
    scale = jnp.maximum(jnp.tile(sizes[:, ::-1], 2), 1)
    outputs = {'boxes': boxes / scale[:, None], **detections}
    if self.masks:
      pooled = self._pool(source, boxes, MASK_BINS)
      heads = self._mask_heads()
      logits = [head(pooled, detections['labels'], train=train) for head in heads]
      outputs['masks'] = sum(map(jax.nn.sigmoid, logits)) / len(heads)
      if origin.grow_masks:
        outputs['grow'] = outputs['valid']
      out['mask_pooled'] = pooled
    return outputs, out

  def _train(self, source, sizes, proposals: dict, targets: dict) -> tuple[dict, dict]:
    """Returns the outputs of the heads for sampled boxes, and the boxes' targets.

    'stages' lists for each stage of boxes: 'boxes' [B, R, 4]; 'label' int [B, R], K for the
    background; 'valid' bool [B, R]; 'target' [B, R, 4]; 'logits' [B, R, K + 1]; and 'deltas'
    [B, R, K or 1, 4]. 'masks' lists for each mask head: 'logits' [B, M, 28, 28] for the
    class of the target; 'boxes' [B, M, 4]; 'valid' bool [B, M]; and 'index' int [B, M], the
    position of the target.
    """
    origin = ORIGINS[self.origin]
    boxes, valid = proposals['boxes'], proposals['valid']
    heads, mask_heads = self._box_heads(), self._mask_heads()
    stages, masks = [], []
    label = None
    for i, head in enumerate(heads):
      rows = {'boxes': boxes, 'valid': valid}
      if i == 0 or origin.resampled:
        rows = _add_targets(rows, targets, origin.targets_first)
      rows = self._label_boxes(i, rows, targets)
      pooled = self._pool(source, rows['boxes'], BOX_BINS)
      if len(heads) > 1:
        pooled = optax.scale_gradient(pooled, origin.stage_gradient)
      logits, deltas = head(pooled, train=True, valid=rows['valid'])
      label = rows['label']
      stages.append({**rows, 'logits': logits, 'deltas': deltas})
      if i < len(mask_heads):
        # Only positives have masks. They come first, and are at most a quarter.
        few = {k: x[:, : max(self.box_sample // 4, 1)] for k, x in rows.items()}
        positive = few['valid'] & (few['label'] < self.num_classes)
        pooled = self._pool(source, few['boxes'], MASK_BINS)
        classes = jnp.minimum(few['label'], self.num_classes - 1)
        logits_of = mask_heads[i](pooled, classes, train=True, valid=positive)
        row = {'logits': logits_of, 'boxes': few['boxes'], 'valid': positive}
        masks.append({**row, 'index': few['index'], 'label': few['label']})
      boxes = self._move(i, rows['boxes'], logits, deltas, sizes, label)
      if origin.resampled:
        # Leave out the targets, because the next stage adds them again.
        valid = rows['valid'] & ~rows['added']
      else:
        valid = rows['valid'] & (coding.sides(boxes) > 0).all(-1)
    return {'stages': stages, 'masks': masks}, {}

  def _label_boxes(self, stage: int, rows: dict, targets: dict) -> dict:
    """Adds 'label', 'target' and its 'index' to boxes; samples the boxes if the stage does."""
    origin, K = ORIGINS[self.origin], self.num_classes
    sampled, R = stage == 0 or origin.resampled, rows['boxes'].shape[1]
    number = min(self.box_sample, R)
    priority = jnp.zeros((len(rows['boxes']), R))
    if sampled and 'roi_priority' in targets:
      priority = targets['roi_priority'][stage]
    elif sampled:
      priority = self._priority(targets, '', stage + 1, R)

    def one(rows, targets, priority):
      iou = overlaps.iou(targets['boxes'][:, None], rows['boxes'][None])
      limit = self.overlaps[stage]
      index, label = assign.match(iou, targets['valid'], limit, limit)
      label = jnp.where(rows['valid'], label, -1)
      rows = {**rows, 'index': index}
      if sampled:
        # A quarter of the boxes to sample, even if there are fewer candidates.
        drawn = assign.sample(priority, label, number, self.box_sample // 4)
        rows = {key: x[drawn.index] for key, x in rows.items()}
        rows['valid'], label = drawn.valid, jnp.where(drawn.positive, 1, 0)
        rows['sampled'] = drawn.index
      index = rows['index']
      label = jnp.where(label == 1, targets['label'][index], K)
      return {**rows, 'label': label, 'target': targets['boxes'][index]}

    objects = {key: targets[key] for key in ('boxes', 'label', 'valid')}
    return jax.vmap(one)(rows, objects, priority)


def sizes_of(images, mask) -> jax.Array:
  """Returns heights and widths of images without padding, float32 [B, 2]."""
  if mask is None:
    size = jnp.array(images.shape[1:3], jnp.float32)
    return jnp.broadcast_to(size, (images.shape[0], 2))
  shown = mask > 0
  sides = shown.any(2).sum(1), shown.any(1).sum(1)
  return jnp.stack(sides, 1).astype(jnp.float32)


def _add_targets(rows: dict, targets: dict, targets_first: bool) -> dict:
  """Adds the targets to proposals; 'added' says which rows are targets."""
  parts = [
    {**rows, 'added': jnp.zeros_like(rows['valid'])},
    {
      'boxes': targets['boxes'],
      'valid': targets['valid'],
      'added': jnp.ones_like(targets['valid']),
    },
  ]
  parts = parts[::-1] if targets_first else parts
  return jax.tree.map(lambda *xs: jnp.concatenate(xs, 1), *parts)


# -- published names ------------------------------------------------------------------

# Fields that published files do not show. Those of detectron2's model zoo have MSRA's ResNets,
# whose blocks have their stride in the first convolution.
MSRA_RESNET = dict(stride_first=True)
DC5 = dict(
  backbone=MSRA_RESNET | dict(dilate_first=True, output_stride=16),
  anchor_sizes=((32, 64, 128, 256, 512),),
  before=(12_000, 6_000),
  after=(2_000, 1_000),
)
TORCHVISION = dict(origin='torchvision', samples=2, after=(2_000, 1_000))
# detectron2's Swin and MViTv2 differ in these fields from classifiers of the same sizes.
STAGES = {
  'swin': dict(borders='pad_always'),
  'mvitv2': dict(window=56, expand='attention', classifier='gap'),
}
# The first words of names.
_KINDS = {
  'faster': dict(masks=False, mask_norm='none'),
  'mask': {},
  'cascade_mask': dict(overlaps=(0.5, 0.6, 0.7), class_agnostic=True),
}


def _newer_heads(norm: str) -> dict:
  return dict(rpn_convs=2, head='4conv1fc', head_norm=norm, mask_norm=norm)


def _resnet(layers: str, **fields) -> dict:
  return dict(name='resnet', variant=layers, frozen_norm=True) | fields


def _detectron2(kind: str, layers: str, end: str) -> tuple[None, dict]:
  fields = dict(backbone=dict(name='fpn', backbone=_resnet(layers, **MSRA_RESNET)))
  if end == 'DC5':
    fields = DC5 | dict(backbone=_resnet(layers, **DC5['backbone']))
  return None, fields | _KINDS[kind]


def _batch_norms(layers: str, end: str) -> tuple[None, dict]:
  resnet = _resnet(layers, frozen_norm=False, **MSRA_RESNET)
  heads = _newer_heads('batch') | (dict(rpn_convs=1) if end == '3x_syncbn' else {})
  return None, heads | dict(backbone=dict(name='fpn', norm='batch', backbone=resnet))


def _vitdet(kind: str, body: str, size: str) -> tuple[None, dict]:
  pyramid = dict(name=f'sfp:{size.upper()}')
  if body in STAGES:
    inside = dict(name=body.removesuffix('v2'), variant=size.upper(), map_norms=True)
    pyramid = dict(name='fpn', norm='layer', backbone=inside | STAGES[body])
  return None, _newer_heads('layer') | _KINDS[kind] | dict(backbone=pyramid)


def _torchvision(kind: str, second: str | None) -> tuple[None, dict]:
  pyramid = dict(name='fpn', backbone=_resnet('50', norm_eps=0.0))
  fields = TORCHVISION | dict(num_classes=90)
  if second:
    pyramid = dict(name='fpn', norm='batch', backbone=_resnet('50', frozen_norm=False))
    fields |= _newer_heads('batch')
  return None, fields | dict(backbone=pyramid) | _KINDS[kind]


# See `Family.published`; the models are those of zoo.json.
_PUBLISHED = (
  (r'(faster|mask)_rcnn_R_(50|101)_(FPN|DC5)_[13]x', _detectron2),
  (r'(cascade_mask)_rcnn_R_(50)_(FPN)_[13]x', _detectron2),
  (r'mask_rcnn_R_(50|101)_FPN_([124]00ep_LSJ)', _batch_norms),
  (r'mask_rcnn_R_(50)_FPN_(3x_syncbn)', _batch_norms),
  (r'(mask|cascade_mask)_rcnn_(vitdet)_([bl])(?:_100ep)?', _vitdet),
  (r'(mask|cascade_mask)_rcnn_(vitdet)_(h)(?:_75ep)?', _vitdet),
  (r'(cascade_mask)_rcnn_(swin)_([bl])_in21k(?:_50ep)?', _vitdet),
  (r'(cascade_mask)_rcnn_(mvitv2)_([blh])_in21k(?:_(?:100|50|36)ep)?', _vitdet),
  (r'(faster|mask)rcnn_resnet50_fpn(_v2)?', _torchvision),
)

_TINY_FPN = fpn.FAMILY.tiny[0] | dict(name='fpn')

FAMILY = Family(
  RCNN,
  variant,
  # Unlike a pyramid, it takes no maps in place of a backbone.
  inputs=lambda fields, size: {},
  published=_PUBLISHED,
  heads=r'box_head\d+/(classes|deltas)/.*|mask_head\d+/(kernel|bias)',
  outputs='regions',
  tiny=(
    dict(
      backbone=_TINY_FPN,
      num_classes=5,
      anchor_sizes=((8,), (16,), (32,)),
      conv_width=8,
      fc_width=16,
      before=(20, 20),
      after=(10, 10),
      anchor_sample=16,
      box_sample=8,
      most=5,
    ),
  ),
)
