"""Files of five families of today: gradients, runs, LoRA, maps, export, conversion."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN
from vit_jax import cli, config, trees, weights
from vit_jax.tools.export import __main__ as export
from vit_jax.train import run
from vit_jax.weights import formats

pytestmark = pytest.mark.usefixtures('one_device')
NAMES = (
  'dinov2_reg4_swiglu_hf',
  'dinov3_timm',
  'eva02_timm',
  'clip_vision_hf',
  'siglip2_so400m_timm',
)
TRAINING = 'channels=3,batch=8,accum=1,steps=4,warmup=1,lr=0.5,data=digits'
QUIET = [
  'log.report=False',
  'log.tensorboard=False',
  'evals={}',
  'checkpoint.best=None',
]
LORA = ["tune={'method': 'lora', 'rank': 2}"]


@pytest.fixture(params=NAMES)
def source(request):
  return str(GOLDEN / request.param)


def trained(source, workdir, *changes):
  """Returns (the last loss, the model that a run leaves)."""
  height = weights.read(source).image_size[0]
  c = config.load(f'configs/finetune.py:weights={source},res={height},{TRAINING}')
  config.override(c, [*QUIET, *changes])
  _, records = run.train(c, workdir)
  return records[-1]['train/loss'], vit_jax.load(str(workdir))


def changed(before, loaded) -> set[str]:
  """Returns the names of parameters that differ, but for the head."""
  before, after = before.flat, trees.flatten(loaded.params)
  names = {n for n in before if n in after and not np.array_equal(before[n], after[n])}
  return {name for name in names if not name.startswith('head/')}


def test_every_parameter_has_a_gradient(source):
  loaded = vit_jax.load(source, num_classes=10)
  head, rng = loaded.params['head'], np.random.default_rng(0)
  head['kernel'] = rng.normal(size=head['kernel'].shape).astype(np.float32)
  images = rng.uniform(-1, 1, (2, *loaded.image_size, 3)).astype(np.float32)

  def loss(params):
    logits, _ = loaded.model.apply({'params': params}, images, train=True)
    return jnp.sin(logits).sum()

  gradients = trees.flatten(jax.jit(jax.grad(loss))(loaded.params))
  # A key's bias changes no attention: it learns through rounding alone.
  assert not [n for n, x in gradients.items() if not x.any() and '/key/bias' not in n]


def test_training(tmp_path):
  source = str(GOLDEN / 'siglip2_so400m_timm')
  before = weights.read(source)
  loss, loaded = trained(source, tmp_path)
  assert np.isfinite(loss)
  same = before.flat.keys() - changed(before, loaded)
  assert not {n for n in same if not n.startswith('head/') and '/key/bias' not in n}


def test_training_of_what_is_added(tmp_path):
  source = str(GOLDEN / 'dinov2_reg4_swiglu_hf')
  before = weights.read(source)
  _, loaded = trained(source, tmp_path, *LORA)
  adapted = weights.read(str(tmp_path))
  assert not changed(before, loaded)
  assert all(n in adapted.flat for n in before.flat if not n.startswith('head/'))
  assert any(np.abs(x).max() > 0.1 for x in adapted.added.values())
  assert loaded.model.untuned.num_classes == 10


def test_maps(source):
  loaded = vit_jax.load(source)
  size = loaded.image_size
  images = np.random.default_rng(0).integers(0, 256, (2, *size, 3)).astype(np.uint8)
  grid = tuple(n // p for n, p in zip(size, loaded.model.patch_size, strict=True))
  for kind in ('rollout', 'attention'):
    maps = vit_jax.attention_maps(loaded, images, kind)
    assert maps.shape == (2, *grid)
    assert np.isfinite(maps).all()
    assert maps.std() > 0


@pytest.mark.parametrize('name', ['eva02_timm', 'siglip2_so400m_timm'])
def test_export(name, tmp_path, capsys):
  # The command reads the program back and compares it with the model.
  source = str(GOLDEN / name)
  argv = [source, str(tmp_path / 'm.stablehlo'), '--to', 'stablehlo', '--json']
  assert cli.run(export.main, [*argv, '--platforms', 'cpu']) == 0
  assert json.loads(capsys.readouterr().out)['difference'] < 1e-5


def test_conversion(source, tmp_path):
  weights.write(weights.read(source), tmp_path / 'ours.npz', 'google')
  theirs, ours = (vit_jax.load(x) for x in (source, tmp_path / 'ours.npz'))
  fields, again = (x.model.fields() for x in (theirs, ours))
  for field in fields.keys() - formats.TRAINING:
    assert again[field] == fields[field], field
  for a, b in zip(*(jax.tree.leaves(x.variables) for x in (ours, theirs)), strict=True):
    np.testing.assert_array_equal(a, b)
