"""Files of five families of today: fine-tuning, LoRA, kNN, maps, export, conversion."""

import json

import jax
import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, commands
from vit_jax import cli, config, trees, weights
from vit_jax.tools import evaluate
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


def test_training(source, tmp_path):
  before = weights.read(source)
  loss, loaded = trained(source, tmp_path / 'all')
  assert np.isfinite(loss)
  same = before.flat.keys() - changed(before, loaded)
  # Every parameter of the backbone learns. A key's bias does so through rounding alone.
  assert not {n for n in same if not n.startswith('head/') and '/key/bias' not in n}
  loss, loaded = trained(source, tmp_path / 'lora', *LORA)
  adapted = weights.read(str(tmp_path / 'lora'))
  assert all(
    np.array_equal(adapted.flat[n], x)
    for n, x in before.flat.items()
    if n in adapted.flat and not n.startswith('head/')
  )
  assert any(np.abs(x).max() > 0.1 for x in adapted.added.values())
  assert loaded.model.untuned.num_classes == 10


def test_features_and_maps(source, tmp_path, capsys):
  loaded = vit_jax.load(source)
  size, rng = loaded.image_size, np.random.default_rng(0)
  images = rng.integers(0, 256, (12, *size, 3)).astype(np.uint8)
  labels = np.arange(12) % 3
  arrays = {
    f'{s}_{k}': x for s in 'ab' for k, x in (('images', images), ('labels', labels))
  }
  np.savez(tmp_path / 'a.npz', **arrays)
  argv = (
    source,
    '--probe',
    'knn',
    '--data',
    f'arrays:{tmp_path}/a.npz',
    '--split',
    'a',
  )
  argv += ('--train', 'b', '--set', 'k=[1]', '--set', 'batch_size=12', '--json')
  assert commands.run(evaluate.main, capsys, *argv)[0] == 0
  grid = tuple(n // p for n, p in zip(size, loaded.model.patch_size, strict=True))
  for kind in ('rollout', 'attention'):
    maps = vit_jax.attention_maps(loaded, images[:2], kind)
    assert maps.shape == (2, *grid)
    assert np.isfinite(maps).all()
    assert maps.std() > 0


def test_export_and_conversion(source, tmp_path, capsys):
  # The command reads the program back and compares it with the model.
  argv = [source, str(tmp_path / 'm.stablehlo'), '--to', 'stablehlo', '--json']
  assert cli.run(export.main, [*argv, '--platforms', 'cpu']) == 0
  assert json.loads(capsys.readouterr().out)['difference'] < 1e-5
  read = weights.read(source)
  weights.write(read, tmp_path / 'ours.npz', 'google')
  theirs, ours = (vit_jax.load(x) for x in (source, tmp_path / 'ours.npz'))
  fields, again = (x.model.fields() for x in (theirs, ours))
  for field in fields.keys() - formats.TRAINING:
    assert again[field] == fields[field], field
  images = np.zeros((1, *theirs.image_size, 3), np.float32)
  for a, b in zip(*(jax.tree.leaves(x.variables) for x in (ours, theirs)), strict=True):
    np.testing.assert_array_equal(a, b)
  assert np.isfinite(ours.model.apply(ours.variables, images)[0]).all()
