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


def train(source, workdir, *changes):
  """Returns (the last loss, the model that a run leaves)."""
  height = weights.read(source).image_size[0]
  c = config.load(f'configs/finetune.py:weights={source},res={height},{TRAINING}')
  config.override(c, [*QUIET, *changes])
  _, records = run.train(c, workdir)
  return records[-1]['train/loss'], vit_jax.load(str(workdir))


def body_of(source) -> dict:
  """Returns {name: array} of a file's parameters, but for the head."""
  flat = weights.read(str(source)).flat
  return {name: x for name, x in flat.items() if not name.startswith('head/')}


def test_training(source, tmp_path):
  loss, loaded = train(source, tmp_path)
  assert np.isfinite(loss)
  before, after = body_of(source), trees.flatten(loaded.params)
  assert before.keys() <= after.keys()
  same = [name for name, x in before.items() if np.array_equal(after[name], x)]
  # Every parameter learns. A key's bias does so through rounding alone.
  assert not [name for name in same if '/key/bias' not in name]


def test_training_of_what_is_added(source, tmp_path):
  _, loaded = train(source, tmp_path, *LORA)
  adapted = weights.read(str(tmp_path))
  for name, x in body_of(source).items():
    np.testing.assert_array_equal(adapted.flat[name], x, err_msg=name)
  assert any(np.abs(x).max() > 0.1 for x in adapted.added.values())
  assert loaded.model.untuned.num_classes == 10


def test_nearest_neighbours(source, tmp_path, capsys):
  size, rng = weights.read(source).image_size, np.random.default_rng(0)
  images = rng.integers(0, 256, (12, *size, 3)).astype(np.uint8)
  arrays = {'images': images, 'labels': np.arange(12) % 3}
  parts = {f'{part}_{name}': x for part in 'ab' for name, x in arrays.items()}
  np.savez(tmp_path / 'a.npz', **parts)
  data = f'arrays:{tmp_path}/a.npz'
  argv = [source, '--probe', 'knn', '--data', data, '--json']
  argv += ['--train', 'b', '--split', 'a', '--set', 'k=[1]', '--set', 'batch_size=12']
  code, output, _ = commands.run(evaluate.main, capsys, *argv)
  assert code == 0
  # Both parts hold the same images: each is its own nearest neighbour.
  assert json.loads(output)[f'{data}_1nn'] == 1


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


def test_export(source, tmp_path, capsys):
  # The command reads the program back and compares it with the model.
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
