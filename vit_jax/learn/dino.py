"""Self-distillation without labels: DINO (arXiv 2104.14294) and DINOv2 (arXiv 2304.07193).

A student sees several crops of an image, and predicts how a teacher assigns the two large crops
to K prototypes. The teacher is the average of the student's parameters, `State.ema`. In DINOv2
the student also predicts the assignment of patches that it does not see (iBOT, arXiv
2111.07832), and KoLeo spreads the features of a batch.

The teacher's targets are computed in `prepare`, over the whole batch, so that devices and
micro-batches do not change them. Losses, heads and constants are those of the authors'
code, facebookresearch/dino and facebookresearch/dinov2.
"""

import contextlib
import math
from typing import Annotated, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax import trees
from vit_jax.check import Count, Factor, Positive, Range, Section, Share
from vit_jax.errors import UserError
from vit_jax.learn.block_masks import RATIO, count_groups, draw_masks
from vit_jax.learn.branches import skip_branches
from vit_jax.learn.masked_patches import change_patches, check_encoder, patches_layer
from vit_jax.models.vit import ViT
from vit_jax.weights.adapt import RESIZERS

STUDENT_TEMPERATURE = 0.1
CENTER_MOMENTUM = 0.9
# Nats of `information` below which a step counts as collapsed, and the number of such steps
# in a row that ends a run.
COLLAPSED, PATIENCE = 0.02, 200


# -- the parts ------------------------------------------------------------------------


class Head(nn.Module):
  """Compares features with prototypes: an MLP, unit length, and K unit vectors.

  Attributes:
    outputs: K, the number of prototypes.
    hidden, bottleneck: widths of the MLP.
    lengths: whether the lengths of the prototypes are trained; otherwise they are 1.
  """

  outputs: Count = 65_536
  hidden: Count = 2048
  bottleneck: Count = 256
  lengths: bool = False

  @nn.compact
  def __call__(self, x):
    """Maps features [..., D] to logits [..., K] in float32."""
    widths = self.hidden, self.hidden, self.bottleneck
    for i, width in enumerate(widths):
      x = x if i == 0 else jax.nn.gelu(x, approximate=False)
      x = nn.Dense(width, kernel_init=nn.initializers.normal(0.02), name=f'Dense_{i}')(
        x
      )
    # PyTorch's initial values of a linear layer.
    limit = self.bottleneck**-0.5
    init = lambda key, shape: jax.random.uniform(
      key, shape, minval=-limit, maxval=limit
    )
    prototypes = self.param('prototypes', init, (self.bottleneck, self.outputs))
    prototypes /= jnp.linalg.norm(prototypes, axis=0)
    if self.lengths:
      prototypes *= self.param('lengths', nn.initializers.ones_init(), (self.outputs,))
    return unit(x, 1e-12) @ prototypes


def unit(x, eps: float):
  """Scales vectors [..., D] to unit length, or divides them by eps if they are shorter."""
  return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), eps**2))


def sinkhorn(logits, mask, rounds: int = 3):
  """Returns numbers [K] to add to logits, so that softmax uses all prototypes alike.

  softmax(logits + numbers) is the authors' Sinkhorn-Knopp: in each round all prototypes get the
  same total, then all rows. Its sums run over the whole batch.

  Args:
    logits: [..., K], divided by the temperature.
    mask: bool [...], False for rows that do not count.
  """
  logits, mask = logits.reshape(-1, logits.shape[-1]), mask.ravel()
  hide = lambda x: jnp.where(mask, x, -jnp.inf)
  rows = hide(jnp.zeros(len(logits)))
  for _ in range(rounds):
    columns = -jax.nn.logsumexp(logits + rows[:, None], axis=0)
    rows = hide(-jax.nn.logsumexp(logits + columns, axis=1))
  return jnp.where(mask.any(), columns, 0.0)


def koleo(x, mask, group: int):
  """Returns [B], -log of the distance of each vector to its nearest neighbour (KoLeo).

  Neighbours are of the same group. Examples i and j are if i = j modulo B / group. So
  micro-batches do not change the groups.

  Args:
    x: features [B, D], which are scaled to unit length.
    mask: bool [B], False for vectors that are nobody's neighbour.
    group: number of vectors in a group; divides B.
  """
  if len(x) % group:
    raise UserError(
      f'config.task.koleo_group={group} does not divide the {len(x)} images of a '
      'micro-batch: lower it.'
    )
  split = lambda x: x.reshape(group, -1, *x.shape[1:]).swapaxes(0, 1)
  y, others = split(unit(x, 1e-8)), split(mask)[:, None] & ~jnp.eye(group, dtype=bool)
  similarities = jnp.einsum('gid,gjd->gij', y, y, precision='highest')
  nearest = jnp.where(others, similarities, -2).argmax(-1)
  nearest = jnp.take_along_axis(y, nearest[..., None], axis=1)
  distances = jnp.linalg.norm(y - nearest + 1e-8, axis=-1)
  return -jnp.log(distances + 1e-8).swapaxes(0, 1).ravel()


def log_student(logits):
  """Returns the student's log-probabilities [..., K]."""
  return jax.nn.log_softmax(logits / STUDENT_TEMPERATURE)


def cross_entropy(targets, log_p):
  """Returns [B], the mean over pairs of a target and another crop.

  Args:
    targets: [B, 2, K], those of the first two crops.
    log_p: [B, n, K].
  """
  pairs = -jnp.einsum('btk,bsk->bts', targets, log_p, precision='highest')
  other = ~jnp.eye(*pairs.shape[1:], dtype=bool)
  return jnp.where(other, pairs, 0).sum((1, 2)) / other.sum()


def hidden_weights(hidden):
  """Returns weights [B, 2, N] for the mean over 2 crops of means over hidden patches.

  Args:
    hidden: bool [B, 2, N]; other patches have the weight 0.
  """
  return hidden / jnp.maximum(hidden.sum(-1, keepdims=True), 1) / 2


def resize_positions(family, params: dict, old, new, method: str) -> dict:
  """Resizes the tables of positions for another grid, in a way that has a gradient.

  Args:
    old, new: (h, w) of the patches.
    method: one of `adapt.RESIZERS`.
  """
  rows, columns = map(RESIZERS[method], old, new)

  def resize(name, x):
    if old == new or (axes := family.position_axes(name)) is None:
      return x
    sides = {'h': old[:1], 'w': old[1:], 'hw': old}[axes]
    before, grid = jnp.split(x[0], [x.shape[1] - math.prod(sides)])
    grid = grid.reshape(*sides, -1)
    if 'h' in axes:
      grid = jnp.tensordot(rows, grid, (1, 0), precision='highest')
    if 'w' in axes:
      last = jnp.moveaxis(grid, -2, 0)
      last = jnp.tensordot(columns, last, (1, 0), precision='highest')
      grid = jnp.moveaxis(last, 0, -2)
    return jnp.concatenate([before, grid.reshape(-1, x.shape[-1])])[None]

  return trees.map_named(resize, params)


def entropy(p):
  """Returns the entropy of distributions [..., K] in nats."""
  return -jax.scipy.special.xlogy(p, p).sum(-1)


def information(p, weight):
  """Returns how much targets p [B, 2, K] tell about their image, in nats.

  It is the entropy of the mean target less the mean of entropies. If it is 0, all images have
  the same target: training has collapsed, be it to one prototype or to all of them.
  """
  mean = jnp.einsum('b,bck->k', weight, p) / p.shape[1]
  return entropy(mean) - weight @ entropy(p).mean(-1)


def rank(x, weight):
  """Returns the effective rank of features [B, D], (sum of variances)^2 / sum of squares.

  Variances are those along the principal axes of the features, scaled to unit length.
  """
  x = unit(x, 1e-8)
  x -= weight @ x
  covariance = jnp.einsum('b,bi,bj->ij', weight, x, x)
  return jnp.trace(covariance) ** 2 / (jnp.square(covariance).sum() + 1e-12)


# -- the task -------------------------------------------------------------------------


class DINO:
  """Predicts how the average of the parameters assigns crops, and hidden patches.

  Batches are those of the op `multi_crop`: 'image' [B, 2, H, W, C] and maybe 'local'
  [B, L, h, w, C]. The heads are stored with the model, under `OWN`.
  """

  CLASSES = None
  OUTPUTS = 'classes'
  OWN = 'dino'

  def __init__(
    self,
    model,
    spec: dict,
    *,
    head: Annotated[dict | None, Section(Head, ('parent', 'name'))] = None,
    patch_head: Annotated[dict, Section(Head, ('parent', 'name'))]
    | Literal['shared']
    | None = None,
    centering: Literal['mean', 'sinkhorn'] = 'mean',
    temperature: Positive = 0.04,
    temperature_start: Positive | None = None,
    temperature_warmup: Annotated[int, Range(2)] | None = None,
    koleo: Factor = 0.0,
    koleo_group: Annotated[int, Range(2)] = 64,
    skip_branches: Share = 0.0,
  ):
    """Checks the model against the spec of batches of crops.

    Args:
      model: a model without a head.
      head: fields of the `Head` that assigns images.
      patch_head: fields of the `Head` that assigns hidden patches; 'shared': the same head
        assigns both; None: patches are not hidden, as in DINO.
      centering: how the teacher is kept from using one prototype: by a moving mean of its
        logits ('mean'), or by `sinkhorn`.
      temperature: of the teacher.
      temperature_start, temperature_warmup: the temperature at step 0, and the number of steps
        in which it rises linearly to `temperature`.
      koleo: weight of the KoLeo term, 0.1 in DINOv2.
      koleo_group: number of images among which KoLeo looks for a neighbour, one device's
        batch in the authors' code.
      skip_branches: share of the images that each residual branch of the student skips.
    """
    check_encoder(self.OWN, model)
    if len(spec['image'].shape) != 5:
      raise ValueError(
        'dino compares crops: end the geometric ops of config.data.pp with multi_crop(...)'
      )
    if (temperature_start is None) != (temperature_warmup is None):
      raise ValueError('temperature_start and temperature_warmup go together')
    self.model, family, fields = model, model.family, model.fields()
    stride = family.stride(fields)
    grid_of = lambda x: tuple(n // s for n, s in zip(x.shape[2:4], stride, strict=True))
    self.grid = grid_of(spec['image'])
    self.patches = math.prod(self.grid)
    self.local_grid = grid_of(spec['local']) if 'local' in spec else None
    # As DINOv2 resizes positions with and without registers; DINO has none.
    self.resize = 'bicubic' if fields.get('registers') else 'bicubic_offset'
    self.head = Head(**head or {})
    self.patch_head = None
    if patch_head:
      self.patch_head = self.head if patch_head == 'shared' else Head(**patch_head)
      self.layer = patches_layer(family)
      crops = 2 * spec['image'].shape[0]
      self.groups, self.most_hidden = count_groups(crops, self.patches)
    self.shared = patch_head == 'shared'
    self.centers = centering == 'mean'
    self.temperature = temperature
    self.warmup = temperature_start, temperature_warmup
    self.koleo, self.koleo_group = koleo, koleo_group
    if skip_branches and (not isinstance(model, ViT) or fields.get('block') == 'post'):
      raise ValueError(
        'skip_branches needs a ViT whose blocks begin with norms: set '
        'config.model.stochastic_depth instead'
      )
    self.skipped = skip_branches

  def init(self, rng, spec: dict) -> dict:
    """Returns the variables of model and heads."""
    image = jnp.zeros((1, *spec['image'].shape[-3:]), jnp.float32)
    keys = jax.random.split(rng, 3)
    (_, out), variables = self.model.init_with_output(keys[0], image)
    if trees.STATS in variables:
      raise UserError('config.task: dino trains models without batch norms.')
    init = lambda head, key: head.init(key, out['pre_logits'])['params']
    own = {'head': init(self.head, keys[1])}
    stats = {'collapsed': jnp.zeros(())}
    if self.centers:
      stats['center'] = jnp.zeros(self.head.outputs)
    if self.patch_head:
      own['mask'] = jnp.zeros(out['encoded'].shape[-1])
      if not self.shared:
        own['patch_head'] = init(self.patch_head, keys[2])
      if self.centers:
        stats['patch_center'] = jnp.zeros(self.patch_head.outputs)
    params = {**variables['params'], self.OWN: own}
    return {'params': params, trees.STATS: {self.OWN: stats}}

  def prepare(self, batch: dict, rng, state) -> dict:
    """Adds what the teacher says of a whole batch, and which patches are hidden.

    'classes' [B, 2, K] are its logits less their center, 'patches' [B, 2, N, D] its features.
    What concerns the batch as a whole is repeated for each example.
    """
    if state.ema is None:
      raise UserError(
        "config.task.name=dino: the teacher is the parameters' average, so set "
        'config.optim.ema, such as 0.996, and config.optim.ema_end=1.0.'
      )
    teacher = state.average().variables()['params']
    images, weight = batch['image'], batch['weight']
    B, stats = len(images), state.batch_stats[self.OWN]
    temperature = self.temperature_at(state.step)
    out = self._encode(teacher, images, features=bool(self.patch_head))
    x = out['pre_logits'].reshape(B, 2, -1)
    logits = self._assign(teacher, x)
    real = jnp.stack([weight > 0] * 2, axis=1)
    center = stats.get('center')
    if not self.centers:
      center = -temperature * sinkhorn(logits / temperature, real)
    new = {'classes': logits - center}
    if self.patch_head:
      hidden = draw_masks(rng, 2 * B, self.grid).reshape(B, 2, -1)
      patches, take = self._patches(out), self._take_hidden(hidden)
      real = hidden & real[..., None]
      center = stats.get('patch_center')
      if not self.centers:
        logits = self._assign_patches(teacher, take(patches))
        center = -temperature * sinkhorn(logits / temperature, take(real))
      center = jnp.broadcast_to(center, (B, *center.shape))
      share = real / jnp.maximum(real.sum(), 1)
      new |= {'hidden': hidden, 'patches': patches, 'patch_center': center}
      new['share'] = share
    targets = jax.nn.softmax(new['classes'] / temperature)
    nats = information(targets, weight)
    numbers = {
      'temperature': temperature,
      'information': nats,
      'teacher_entropy': weight @ entropy(targets).mean(-1),
      'rank': rank(x[:, 0], weight),
      # The number of steps in a row that collapsed.
      'collapsed': jnp.where(nats < COLLAPSED, stats['collapsed'] + 1, 0.0),
    }
    return batch | new | {key: jnp.full(B, x) for key, x in numbers.items()}

  def temperature_at(self, step):
    """Returns the teacher's temperature after `step` updates."""
    start, steps = self.warmup
    if start is None:
      return self.temperature
    return start + (self.temperature - start) * jnp.minimum(step / (steps - 1), 1.0)

  def loss(self, variables, batch: dict, rng):
    """Returns (loss, (metrics, batch statistics)) of a prepared batch."""
    params, weight = variables['params'], batch['weight']
    temperature = batch['temperature'][:, None, None]
    call = lambda i: dict(train=True, rngs={'dropout': jax.random.fold_in(rng, i)})
    with self._hide(params, batch), skip_branches(self.skipped):
      out = self._encode(
        params, batch['image'], features=bool(self.patch_head), **call(0)
      )
    x = out['pre_logits'].reshape(*batch['image'].shape[:2], -1)
    seen = [x]
    if 'local' in batch:
      local = resize_positions(
        self.model.family, params, self.grid, self.local_grid, self.resize
      )
      with skip_branches(self.skipped):
        local = self._encode(local, batch['local'], features=False, **call(1))
      seen.append(local['pre_logits'].reshape(*batch['local'].shape[:2], -1))
    log_p = log_student(self._assign(params, jnp.concatenate(seen, axis=1)))
    targets = jax.nn.softmax(batch['classes'] / temperature)
    sums = {'loss_dino': weight @ cross_entropy(targets, log_p)}
    loss = sums['loss_dino']
    if self.koleo:
      terms = [koleo(x[:, i], weight > 0, self.koleo_group) for i in range(2)]
      sums['loss_koleo'] = weight @ sum(terms)
      loss += self.koleo * sums['loss_koleo']
    patch_mean = None
    if self.patch_head:
      take = self._take_hidden(batch['hidden'])
      logits = self._assign_patches(variables['average'], take(batch['patches']))
      logits -= batch['patch_center'][0]
      log_p = log_student(self._assign_patches(params, take(self._patches(out))))
      losses = -(jax.nn.softmax(logits / temperature[0]) * log_p).sum(-1)
      weights = weight[:, None, None] * hidden_weights(batch['hidden'])
      sums['loss_ibot'] = (take(weights) * losses).sum()
      loss += sums['loss_ibot']
      patch_mean = jnp.einsum('gm,gmk->k', take(batch['share']), logits)
    for key in ('information', 'teacher_entropy', 'rank', 'collapsed'):
      sums[key] = weight @ batch[key]
    stats = self._update(variables[trees.STATS], batch, patch_mean)
    return loss, ({'loss': loss, **sums}, stats)

  def _update(self, stats: dict, batch: dict, patch_mean) -> dict:
    """Returns the statistics after a micro-batch, which adds its share to each center.

    Args:
      patch_mean: [K], its share of the mean of the teacher's logits of hidden patches, less
        their center; None without a head of patches.
    """
    own = dict(stats[self.OWN])
    move = 1 - CENTER_MOMENTUM
    if 'center' in own:
      own['center'] += move * (batch['weight'] @ batch['classes'].mean(1))
    if 'patch_center' in own:
      own['patch_center'] += move * patch_mean
    own['collapsed'] = batch['collapsed'][0]
    return stats | {self.OWN: own}

  def find_problem(self, metrics: dict) -> str:
    """Returns why a run with these metrics of a step should end; '' if it should go on."""
    if round(float(metrics['collapsed'])) < PATIENCE:
      return ''
    return (
      f'Training collapsed: in the last {PATIENCE} steps the teacher assigned all images '
      f'alike (information below {COLLAPSED} nats, teacher_entropy '
      f'{float(metrics["teacher_entropy"]):.2f} of {math.log(self.head.outputs):.2f}). '
      'Lower config.task.temperature or config.optim.lr, raise config.optim.ema, or set '
      'config.task.centering=sinkhorn.'
    )

  def predict(self, variables, batch: dict) -> dict:
    """Returns the model's features of whole images [B, H, W, C]."""
    _, out = self.model.apply(
      {'params': self._encoder(variables['params'])}, batch['image'], train=False
    )
    return out

  def _encoder(self, params) -> dict:
    return {name: x for name, x in params.items() if name != self.OWN}

  def _encode(self, params, crops, **call) -> dict:
    """Returns the model's features of crops [B, n, H, W, C], as rows of [B n, ...]."""
    images = crops.reshape(-1, *crops.shape[2:])
    return self.model.apply({'params': self._encoder(params)}, images, **call)[1]

  def _assign(self, params, x):
    return self.head.apply({'params': params[self.OWN]['head']}, x)

  def _assign_patches(self, params, x):
    """Returns logits [G, M, K] of the features of patches [G, M, D]."""
    own = params[self.OWN]['head' if self.shared else 'patch_head']
    return self.patch_head.apply({'params': own}, x)

  def _patches(self, out: dict):
    """Returns the features [B, 2, N, D] of the patches of two crops."""
    x = out['encoded'][:, -self.patches :]  # without a class token and registers
    return x.reshape(-1, 2, *x.shape[1:])

  def _take_hidden(self, hidden):
    """Returns a function [B, 2, N, ...] -> [G, M, ...], which takes the hidden patches.

    Groups are those of `block_masks`, so that a device takes only patches of its own. Other
    patches fill up the M, the most that a group can have.
    """
    B = len(hidden)
    # A micro-batch has a part of each group, or else images that count by themselves.
    groups = self.groups if B % self.groups == 0 else B
    most = min(self.most_hidden, 2 * B // groups * int(self.patches * RATIO[1]))
    rows = lambda x: x.reshape(groups, -1, *x.shape[3:])
    order = jnp.argsort(~rows(hidden), axis=1, stable=True)[:, :most]

    def take(x):
      at = order.reshape(*order.shape, *[1] * (x.ndim - 3))
      return jnp.take_along_axis(rows(x), at, axis=1)

    return take

  def _hide(self, params, batch: dict) -> contextlib.AbstractContextManager:
    """Returns a context manager in which the mask replaces the hidden patches."""
    if not self.patch_head:
      return contextlib.nullcontext()
    hidden = batch['hidden'].reshape(-1, self.patches, 1)
    mask = params[self.OWN]['mask']
    return change_patches(
      self.layer, lambda x: jnp.where(hidden, mask.astype(x.dtype), x)
    )
