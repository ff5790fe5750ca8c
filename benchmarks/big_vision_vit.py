"""big_vision's ViT in a plain training step, to be compiled beside ours.

Its `models/vit.py` from a checkout, and around it what its `train.py` does of the same
mathematics: clipping, Adam with a bfloat16 first moment, decoupled weight decay; no mask,
no check of finiteness, no counters.
"""

import sys
import types

from vit_jax.errors import UserError

_POOLS = {'token': 'tok', 'gap': 'gap', 'map': 'map'}
_SAME = (
  'num_classes',
  'patch_size',
  'width',
  'depth',
  'mlp_dim',
  'num_heads',
  'dropout',
)


def load(checkout: str, optim: dict):
  """Returns a function (subject, batch, devices) -> its lowered step.

  Args:
    checkout: the folder of big_vision.
    optim: the config's section `optim` of our step.
  """
  sys.path.insert(0, checkout)
  # Its ViT takes functions from these that load checkpoints and need TensorFlow.
  for name in ('utils', 'models.common'):
    sys.modules[f'big_vision.{name}'] = types.ModuleType(f'big_vision.{name}')
  try:
    import big_vision.models
  except ImportError:
    raise UserError(
      f'--big_vision {checkout}: no checkout of github.com/google-research/big_vision.'
    ) from None
  big_vision.utils = sys.modules['big_vision.utils']
  big_vision.models.common = sys.modules['big_vision.models.common']
  from big_vision.models import vit

  return lambda *args: _lower(vit, optim, *args)


def _lower(vit, optim: dict, subject, batch: int, devices):
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax
  from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

  from vit_jax import models

  ours = models.build(**subject.section)
  if ours.scan or ours.remat != 'none':
    raise UserError('--big_vision compares models without scan and remat.')
  model = vit._Model(
    **{field: getattr(ours, field) for field in _SAME},
    pool_type=_POOLS[ours.classifier],
    posemb=ours.posemb,
    rep_size=ours.representation_size or False,
    dtype_mm=subject.dtype,
  )
  mesh = Mesh(np.array(devices), ('data',), axis_types=(AxisType.Auto,))
  everywhere = NamedSharding(mesh, PartitionSpec())
  place = lambda tree: jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree
  )
  image = jax.ShapeDtypeStruct((1, *subject.size, 3), 'float32')
  params = jax.eval_shape(model.init, jax.random.key(0), image)['params']
  kernels = lambda p: jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key == 'kernel', p
  )
  tx = optax.chain(
    optax.clip_by_global_norm(optim['clip']),
    optax.scale_by_adam(mu_dtype=optim['moment_dtype']),
    optax.add_decayed_weights(optim['wd'], kernels),
    optax.scale(-optim['lr']),
  )

  def step(state, batch):
    params, opt = state

    def loss(params):
      rngs = {'dropout': jax.random.fold_in(jax.random.key(0), opt[1].count)}
      images = batch['image'].astype(jnp.float32) * (2 / 255) - 1
      logits, _ = model.apply({'params': params}, images, train=True, rngs=rngs)
      targets = jax.nn.one_hot(batch['label'], logits.shape[-1])
      return optax.softmax_cross_entropy(logits.astype(jnp.float32), targets).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt = tx.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), value

  spec = {k: x for k, x in subject.spec(batch).items() if k != 'mask'}
  state = params, jax.eval_shape(tx.init, params)
  with jax.set_mesh(mesh):
    jitted = jax.jit(step, donate_argnums=0, out_shardings=everywhere)
    return jitted.lower(place(state), place(spec))
