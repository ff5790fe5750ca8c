"""The reference's model, as a tuning method changes it; steps of tuned models."""

import functools
from pathlib import Path

import jax
import numpy as np

from tests.support import GOLDEN, runs
from vit_jax import models, sharding, tasks, trees, tune, weights
from vit_jax.train.step import init_state, make_step

BLOCK = 'tune/Transformer/encoderblock_{}'
# Methods of the reference, and none.
SECTIONS = {
  'none': dict(method='linear'),
  'vpt_shallow': dict(method='vpt', number=5),
  'vpt_deep': dict(method='vpt', number=4, deep=True),
  'lora': dict(method='lora', rank=4, alpha=8),
  'adapter': dict(method='adapter', reduction=8),
}


@functools.cache
def vit():
  """Returns the model, loaded: 3 blocks, 48 wide, images of 32 x 32 in patches of 8."""
  return weights.load(str(GOLDEN / 'vit_timm'))


@functools.cache
def reference():
  """Returns {name: array} of the images and outputs."""
  with np.load(GOLDEN / 'tuning.npz') as file:
    return dict(file)


def attach(model=None, **section):
  """Returns a model as tuned; None: the reference's."""
  model = vit().model if model is None else model
  return tune.attach(model, model.family, (32, 32, 3), **section)[0]


def run(section: dict, added: dict):
  """Returns (logits, out) of the reference's images, with these added parameters."""
  tuned, images = attach(**section), reference()['image']
  shapes = jax.eval_shape(tuned.init, jax.random.key(0), images)['params']
  flat = trees.flatten(vit().params) | added
  expected = {name: x.shape for name, x in trees.flatten(shapes).items()}
  assert {name: x.shape for name, x in flat.items()} == expected
  return tuned.apply({'params': trees.unflatten(flat)}, images)


@functools.cache
def plain():
  """Returns (logits, out) of the reference's model and images, as they are."""
  return vit().model.apply(vit().variables, reference()['image'])


def of_reference(method: str) -> dict:
  """Returns the parameters that the reference adds, under our names."""
  x, added = reference(), {}
  if method == 'vpt_shallow':
    return {'tune/prompts': x['vpt_shallow_prompts'][None]}
  if method == 'vpt_deep':
    return {'tune/prompts': x['vpt_deep_prompts']}
  for i in range(3):
    at = BLOCK.format(i)
    for layer in ('query', 'value') if method == 'lora' else ():
      path = f'{at}/MultiHeadDotProductAttention_0/{layer}'
      added[f'{path}/lora_a'] = x[f'lora_{layer[0]}_A'][i].T
      added[f'{path}/lora_b'] = x[f'lora_{layer[0]}_B'][i].T
    for layer in ('down', 'up') if method == 'adapter' else ():
      added[f'{at}/MlpBlock_0/{layer}/kernel'] = x[f'adapter_{layer}_w'][i].T
      added[f'{at}/MlpBlock_0/{layer}/bias'] = x[f'adapter_{layer}_b'][i]
  return added


def write_body(folder) -> Path:
  """Writes the weights of the small run's model, all but its head; returns the file."""
  model = models.build(**runs.small()['model'], num_classes=10)
  flat = random(model.shapes((8, 8, 1))['params'])
  body = {name: x for name, x in flat.items() if not name.startswith('head/')}
  np.savez(folder / 'weights.npz', **body)
  return folder / 'weights.npz'


def batch_of(examples: int, side: int) -> dict:
  """Returns a random batch of square images of five classes."""
  rng = np.random.default_rng(0)
  image = rng.uniform(-1, 1, (examples, side, side, 3)).astype(np.float32)
  label = rng.integers(0, 5, examples).astype(np.int32)
  return {'image': image, 'label': label, 'mask': np.ones(examples, np.float32)}


def random(shapes) -> dict:
  """Returns {name: value}: to compile the initialisers would take as long as a step."""
  rng = np.random.default_rng(0)

  def value(name, x):
    mean = 1.0 if name.endswith('/scale') else 0.0
    return (mean + 0.1 * rng.normal(size=x.shape)).astype(x.dtype)

  return {name: value(name, x) for name, x in trees.flatten(shapes).items()}


def steps(model, rules, optimizer, batch, *, number, mesh=None, initial=None):
  """Returns (state before, state after, metrics of the first step).

  Args:
    initial: {name: value} of parameters; None: random ones, also in the head.
  """
  spec, key = jax.eval_shape(lambda: batch), jax.random.key(0)
  task = tasks.build('classify', model, spec)
  mesh = mesh or sharding.make_mesh(1, devices=jax.devices()[:1])
  if initial is None:
    initial = random(jax.eval_shape(task.init, key, spec)['params'])
  init = functools.partial(init_state, task, optimizer, spec, key, initial, rules)
  # What LLVM would gain by optimising takes longer than two steps do.
  fast = {'xla_backend_optimization_level': 0}
  before = jax.device_get(jax.jit(init).lower().compile(fast)())
  with jax.set_mesh(mesh):
    places = sharding.state_shardings(before, mesh, 'fsdp')
    state, rows = jax.device_put(before, places), []
    step = make_step(task, optimizer, lambda batch: batch, key)
    step = jax.jit(step, out_shardings=(places, sharding.replicated_sharding(mesh)))
    fed = sharding.global_batch(batch, mesh)
    step = step.lower(state, fed).compile(fast)
    for _ in range(number):
      state, metrics = step(state, fed)
      rows.append(metrics)
  return before, jax.device_get(state), rows[0]
