"""Exported programs, run in processes that cannot import this library."""

import functools
import json
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import GOLDEN, classifiers, naming
from tests.support.goldens import GOLDENS, path_of
from tests.support.without import BLOCK
from vit_jax import cli, models, weights
from vit_jax.errors import UserError
from vit_jax.kernels import attention
from vit_jax.tools import convert
from vit_jax.tools.export import __main__ as export
from vit_jax.tools.export import program, savedmodel, stablehlo
from vit_jax.weights import pipelines

SOURCE = path_of('vit_google_token')  # 10 classes, 32 x 32 pixels
# A golden of each kind of model.
FAMILIES = (
  *('hybrid_google', 'mixer_google', 'bit_timm', 'resnet_timm'),
  *('convnext_timm', 'swin_hf', 'mvit_timm'),
)
READERS = {
  'stablehlo': """
from jax import export
call = export.deserialize(bytearray(open(file, 'rb').read())).call
""",
  'savedmodel': """
import tensorflow as tf
model = tf.saved_model.load(file)
call = lambda x: model.signatures['serving_default'](images=tf.constant(x))
""",
}
# Reads FILE and EXPECTED, argv[1:3], and writes the program's outputs for the images to
# argv[3]: for all of them, and for the first alone.
PROGRAM = """
import numpy as np
for name in blocked:
  try: __import__(name)
  except ModuleNotFoundError: continue
  raise AssertionError(f'{name} can be imported')
_, file, expected, out = sys.argv
images = np.load(expected)['image']
READER
whole = {k: np.asarray(v) for k, v in call(images).items()}
for k, v in call(images[:1]).items(): whole[k + ' alone'] = np.asarray(v)
np.savez(out, **whole)
"""


def run(*args) -> int:
  return cli.run(export.main, [str(arg) for arg in args])


def size_of(golden) -> tuple[str, str]:
  """Returns the option for the resolution of a golden's images."""
  with np.load(GOLDEN / f'{golden}.expected.npz') as file:
    height, width = file['image'].shape[1:3]
  return '--resolution', f'{height}x{width}'


def check(golden, to, tmp_path, *options):
  """Exports a golden, runs the file in a process of its own, and compares the logits.

  Another compiler sums in another order, as the other library did: its tolerance covers both.
  """
  name = 'model.stablehlo' if to == 'stablehlo' else 'model'
  file, out = tmp_path / name, tmp_path / 'out.npz'
  assert run(path_of(golden), file, '--to', to, *size_of(golden), *options) == 0
  # The reader of TensorFlow has no JAX either.
  blocked = 'vit_jax,jax,flax' if to == 'savedmodel' else 'vit_jax,flax'
  code = BLOCK + PROGRAM.replace('READER', READERS[to])
  expected = GOLDEN / f'{golden}.expected.npz'
  env = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'XLA_FLAGS')}
  argv = [sys.executable, '-c', code, blocked, str(file), str(expected), str(out)]
  done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  with np.load(out) as arrays, np.load(expected) as theirs:
    outputs, logits = dict(arrays), theirs['logits']
  tolerance = GOLDENS[golden][2] * max(1, np.abs(logits).max())
  assert outputs['logits'].dtype == np.float32
  np.testing.assert_allclose(outputs['logits'], logits, rtol=0, atol=tolerance)
  alone = outputs['logits alone']
  np.testing.assert_allclose(alone, logits[:1], rtol=0, atol=tolerance)
  return file, outputs


def test_stablehlo_without_this_library(tmp_path, capsys):
  options = ('--layers', 'pre_logits,block01', '--json')
  file, outputs = check('vit_google_token', 'stablehlo', tmp_path, *options)
  images = len(outputs['logits'])
  assert images > 1
  assert outputs['pre_logits'].shape == (images, 48)
  assert outputs['block01'].shape == (images, 17, 48)
  record = json.loads(capsys.readouterr().out)
  facts_file = tmp_path / 'model.json'
  assert record['files'] == [str(facts_file), str(file)]
  assert record['difference'] < 1e-6
  names = {path.name for path in tmp_path.iterdir()}
  assert names == {file.name, facts_file.name, 'out.npz'}
  about = json.loads(facts_file.read_text())
  assert about['platforms'] == ['cpu', 'tpu', 'cuda']
  assert about['input']['shape'] == ['batch', 32, 32, 3]
  assert about['outputs']['logits'] == {'dtype': 'float32', 'shape': ['batch', 10]}
  assert about['outputs'].keys() == {'logits', 'pre_logits', 'block01'}
  # [0, 255] to [-1, 1]
  assert (about['input']['mean'], about['input']['std']) == ([0.5] * 3, [0.5] * 3)


def test_outputs_of_a_detector():
  loaded = weights.load(path_of('detr_hf'), image_size=(64, 64))
  made = program.Program(loaded, ['projected'], batch=None)
  shapes = {'logits': (10, 7), 'boxes': (10, 4), 'projected': (2, 2, 32)}
  assert made.outputs == shapes
  # A program takes no mask, so images fill its input; pixels are standardised as before.
  about = program.describe(loaded, made, 'stablehlo', ['cpu'])
  size = 'resize((64, 64), antialias=True)'
  assert about['preprocessing']['text'].split('|')[:2] == ['decode', size]
  assert about['input']['mean'] == pytest.approx([0.485, 0.456, 0.406], abs=1e-5)


@pytest.mark.parametrize('golden', FAMILIES)
def test_stablehlo_of_every_family(golden, tmp_path):
  with np.load(GOLDEN / f'{golden}.expected.npz') as theirs:
    images, logits = theirs['image'], theirs['logits']
  loaded = weights.load(path_of(golden), image_size=images.shape[1:3])
  made, file = program.Program(loaded, (), None), tmp_path / 'm.stablehlo'
  stablehlo.write(made, file, {}, ['cpu'])
  result, own = (
    x['logits'] for x in (stablehlo.run(file, images), made.run_on_cpu(images))
  )
  assert result.dtype == np.float32
  np.testing.assert_allclose(result, own, rtol=0, atol=1e-5 * np.abs(own).max())
  tolerance = GOLDENS[golden][2] * max(1, np.abs(logits).max())
  np.testing.assert_allclose(result, logits, rtol=0, atol=tolerance)


def test_savedmodel_without_this_library(tmp_path, capsys):
  options = ('--platforms', 'cpu,tpu', '--json')
  folder, _ = check('vit_google_token', 'savedmodel', tmp_path, *options)
  record = json.loads(capsys.readouterr().out)
  assert record['difference'] < 1e-6
  about = json.loads((folder / 'assets.extra' / 'vit_jax.json').read_text())
  assert about['platforms'] == ['cpu', 'tpu']
  assert {path.name for path in tmp_path.iterdir()} == {'model', 'out.npz'}


@pytest.mark.parametrize('family', [*classifiers(), 'rcnn'])
def test_bfloat16_is_portable(family, monkeypatch):
  # No call into a library of one platform, whatever is installed here; any batch.
  monkeypatch.setattr(attention, 'cudnn', lambda q, k, v: jnp.cbrt(v))
  fields = models.family(family).tiny[0]
  model = models.build(family, **{'num_classes': 5, **fields}, dtype='bfloat16')
  images = jax.ShapeDtypeStruct((1, 32, 32, 3), 'float32')
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)
  variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  loaded = weights.Loaded(
    model=model,
    variables=variables,
    image_size=(32, 32),
    channels=3,
    pp='',
    class_names=None,
    source='',
    format='',
    report='',
  )
  made = program.Program(loaded, (), None)
  (batch,) = jax.export.symbolic_shape('batch')
  images = jax.ShapeDtypeStruct(made.shape(batch), 'float32')
  lower = jax.export.export(
    jax.jit(made.run_with_constants), platforms=['cpu', 'tpu', 'cuda']
  )
  exported = lower(images)
  text = exported.mlir_module()
  assert 'cbrt' not in text
  assert {*re.findall(r'custom_call @(\w+)', text)} <= {'shape_assertion'}
  shapes = ['batch,5']
  if family == 'rcnn':  # boxes, labels, masks, scores, valid
    shapes = ['batch,5,4', 'batch,5', 'batch,5,28,28', 'batch,5', 'batch,5']
  assert [str(x) for x in exported.out_avals] == [f'float32[{x}]' for x in shapes]
  assert made.dtype == 'bfloat16'


def test_scanned_blocks_are_written_out(tmp_path, monkeypatch, capsys):
  load = weights.load
  monkeypatch.setattr(weights, 'load', functools.partial(load, scan=True))
  file = tmp_path / 'm.stablehlo'
  options = ('--batch', 3, '--platforms', 'tpu')
  assert run(SOURCE, file, '--to', 'stablehlo', *options) == 0
  assert 'not compared' in capsys.readouterr().out  # for want of the platform cpu
  exported = jax.export.deserialize(bytearray(file.read_bytes()))
  assert 'stablehlo.while' not in exported.mlir_module()
  assert exported.in_avals[0].shape == (3, 32, 32, 3)


def test_detectors_as_savedmodel_have_a_number_of_images(tmp_path):
  class Sorting:
    batch, variables, outputs = None, {}, {'best': (2,)}
    shape = lambda self, batch: (batch, 4, 4, 1)

    def __call__(self, variables, images):
      return {'best': jax.lax.top_k(images[:, 0, :, 0], 2)[0]}

  with pytest.raises(UserError, match='--batch'):
    savedmodel.write(Sorting(), tmp_path / 'm', {}, ['cpu'])


def test_a_file_that_computes_something_else_is_not_left(tmp_path, capsys, monkeypatch):
  right = stablehlo.run
  off = lambda *args: {k: v * 1.01 for k, v in right(*args).items()}
  monkeypatch.setattr(stablehlo, 'run', off)
  assert run(SOURCE, tmp_path / 'm.stablehlo', '--to', 'stablehlo') == 1
  assert 'differ from' in capsys.readouterr().err
  assert not list(tmp_path.iterdir())


def test_pixels_that_no_mean_and_std_describe():
  assert pipelines.read_levels('decode|value_range(-1, 1, 0, 100, clip=True)') is None


def test_models_that_a_file_cannot_hold(tmp_path):
  large = types.SimpleNamespace(params=2**29)  # two GiB
  with pytest.raises(UserError, match=naming('GiB', '--to savedmodel')):
    stablehlo.write(large, tmp_path / 'm.stablehlo', {}, ['cpu'])
  assert not list(tmp_path.iterdir())


@pytest.mark.peer
def test_onnx_by_pytorchs_exporter(tmp_path):
  # As docs/guides/export.md shows it.
  torch, timm = pytest.importorskip('torch'), pytest.importorskip('timm')
  onnxruntime = pytest.importorskip('onnxruntime')
  folder, file = tmp_path / 'folder', tmp_path / 'model.onnx'
  assert cli.run(convert.main, [str(SOURCE), str(folder), '--to', 'timm']) == 0
  model = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
  images = np.random.default_rng(0).uniform(-1, 1, (2, 3, 32, 32)).astype(np.float32)
  torch.onnx.export(
    model,
    (torch.from_numpy(images),),
    file,
    input_names=['images'],
    output_names=['logits'],
    dynamic_shapes=({0: 'batch'},),
    dynamo=True,
  )
  loaded = weights.load(SOURCE)
  expected, _ = loaded.model.apply(loaded.variables, images.transpose(0, 2, 3, 1))
  session = onnxruntime.InferenceSession(file, providers=['CPUExecutionProvider'])
  for number in (2, 1):
    (logits,) = session.run(['logits'], {'images': images[:number]})
    np.testing.assert_allclose(logits, expected[:number], rtol=0, atol=1e-4)
