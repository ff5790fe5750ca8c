"""big_vision's ViT in a plain training step, to be compiled beside ours.

Its `models/vit.py` from the user's checkout, and around it what its `train.py` does of
the same mathematics: clipping, Adam with a bfloat16 first moment, decoupled weight decay;
no mask, no check of finiteness, no counters.
"""

import sys
import types
from pathlib import Path

from vit_jax.errors import UserError

_POOLS = {'token': 'tok', 'gap': 'gap', 'map': 'map'}
# Fields of ours that its ViT has in another form, or that are asked for below.
_SAME = (
  'num_classes',
  'patch_size',
  'width',
  'depth',
  'mlp_dim',
  'num_heads',
  'dropout',
)
# What it does not have: only their defaults can be compared.
_OURS_ALONE = {'stochastic_depth': 0.0, 'stem_blocks': None}
_OURS_ALONE |= {'act': 'gelu_tanh', 'posemb_where': 'stem', 'attention': 'full'}
_POSEMBS = ('learn', 'sincos2d')


class Peer:
  """A checkout of big_vision."""

  def __init__(self, path: str):
    """Imports its ViT.

    Raises:
      UserError: if there is none.
    """
    if not (Path(path) / 'big_vision/models/vit.py').exists():
      raise UserError(
        f'--big_vision {path}: there is no big_vision/models/vit.py. Name a checkout of '
        'github.com/google-research/big_vision.'
      )
    sys.path.insert(0, str(path))
    # What its ViT takes from these is for loading checkpoints, and needs TensorFlow.
    for name in ('utils', 'models.common'):
      sys.modules[f'big_vision.{name}'] = types.ModuleType(f'big_vision.{name}')
    import big_vision
    import big_vision.models

    big_vision.utils = sys.modules['big_vision.utils']
    big_vision.models.common = sys.modules['big_vision.models.common']
    from big_vision.models import vit

    self._vit = vit

  def check(self, model) -> None:
    """Refuses a model that has no counterpart there.

    Raises:
      UserError: naming the field.
    """
    from vit_jax.models.vit import ViT

    module = model.module
    if not isinstance(module, ViT):
      raise UserError(f'--vs big_vision compares ViTs; {model.name} is another model.')
    for field, default in _OURS_ALONE.items():
      if getattr(module, field) != default:
        raise UserError(
          f'--vs big_vision: its ViT has no {field}; leave it {default!r}.'
        )
    if module.classifier not in _POOLS or module.posemb not in _POSEMBS:
      raise UserError(
        f'--vs big_vision: its ViT has no classifier={module.classifier!r} with '
        f'posemb={module.posemb!r}.'
      )
    if module.remat != 'none' and not module.scan:
      raise UserError('--vs big_vision: its ViT recomputes only with scan; set both.')

  def lower(self, model, mode: str, batch: int, devices):
    """Returns its lowered program for one device; arguments as `ahead.lower` takes them."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from vit_jax.nn.stack import REMAT
    from vit_jax.tools.bench import ours

    mine = model.module
    module = self._vit._Model(
      **{field: getattr(mine, field) for field in _SAME},
      pool_type=_POOLS[mine.classifier],
      posemb=mine.posemb,
      rep_size=mine.representation_size or False,
      scan=mine.scan,
      remat_policy=REMAT[mine.remat] or 'none',
      dtype_mm=mine.dtype.name,
    )
    mesh = Mesh(np.array(devices), ('data',), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    place = lambda tree: jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree
    )
    image = jax.ShapeDtypeStruct((1, *model.size, 3), 'float32')
    params = jax.eval_shape(module.init, jax.random.key(0), image)['params']
    scale = lambda image: image.astype(jnp.float32) * (2 / 255) - 1
    batch = {
      'image': jax.ShapeDtypeStruct((batch, *model.size, 3), 'uint8'),
      'label': jax.ShapeDtypeStruct((batch,), 'int32'),
    }
    with jax.set_mesh(mesh):
      if mode == 'forward':
        forward = lambda p, b: module.apply({'params': p}, scale(b['image']))[0]
        jitted = jax.jit(forward, out_shardings=everywhere)
        return jitted.lower(place(params), {'image': place(batch['image'])})
      section = ours.OPTIM_AHEAD
      kernels = lambda p: jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key == 'kernel', p
      )
      tx = optax.chain(
        optax.clip_by_global_norm(section['clip']),
        optax.scale_by_adam(mu_dtype=section['moment_dtype']),
        optax.add_decayed_weights(section['wd'], kernels),
        optax.scale(-section['lr']),
      )

      def step(state, batch):
        params, opt = state

        def loss(params):
          rngs = {'dropout': jax.random.fold_in(jax.random.key(0), opt[1].count)}
          logits, _ = module.apply(
            {'params': params}, scale(batch['image']), train=True, rngs=rngs
          )
          targets = jax.nn.one_hot(batch['label'], logits.shape[-1])
          logits = logits.astype(jnp.float32)
          return optax.softmax_cross_entropy(logits, targets).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

      state = place((params, jax.eval_shape(tx.init, params)))
      jitted = jax.jit(step, donate_argnums=0, out_shardings=everywhere)
      return jitted.lower(state, place(batch))
