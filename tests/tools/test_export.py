"""Exported programs, run in processes that cannot import this library."""

import functools
import json
import re

import jax
import numpy as np
import pytest

from tests.support import classifiers, commands, naming
from tests.support.exported import FAMILIES, SOURCE, check, run
from tests.support.goldens import path_of
from vit_jax import cli, models, weights
from vit_jax.kernels import attention
from vit_jax.tools import convert
from vit_jax.tools.export import __main__ as export
from vit_jax.tools.export import facts, program, stablehlo


def test_stablehlo_without_this_library(tmp_path, capsys):
  file, found = check(
    *('vit_google_token', 'stablehlo', tmp_path),
    *('--layers', 'pre_logits,block01', '--json'),
  )
  images = len(found['logits'])
  assert images > 1
  assert found['pre_logits'].shape == (images, 48)
  assert found['block01'].shape == (images, 17, 48)
  record = json.loads(capsys.readouterr().out)
  facts_file = tmp_path / 'model.json'
  assert record['files'] == [str(facts_file), str(file)]
  assert record['difference'] < 1e-6
  assert {path.name for path in tmp_path.iterdir()} == {
    *(file.name, facts_file.name, 'out.npz')
  }
  about = json.loads(facts_file.read_text())
  assert about['platforms'] == ['cpu', 'tpu', 'cuda']
  assert about['input']['shape'] == ['batch', 32, 32, 3]
  assert about['outputs']['logits'] == {'dtype': 'float32', 'shape': ['batch', 10]}
  assert about['outputs'].keys() == {'logits', 'pre_logits', 'block01'}
  # [0, 255] to [-1, 1]
  assert (about['input']['mean'], about['input']['std']) == ([0.5] * 3, [0.5] * 3)


def test_outputs_of_a_detector():
  loaded = weights.load(path_of('detr_hf'), image_size=(64, 64))
  found = program.Program(loaded, ['projected'], batch=None)
  shapes = {'logits': (10, 7), 'boxes': (10, 4), 'projected': (2, 2, 32)}
  assert found.outputs == shapes
  # A program takes no mask, so images fill its input; pixels are standardised as before.
  about = facts.collect(loaded, found, 'stablehlo', ['cpu'])
  size = 'resize((64, 64), antialias=True)'
  assert about['preprocessing']['text'].split('|')[:2] == ['decode', size]
  assert about['input']['mean'] == pytest.approx([0.485, 0.456, 0.406], abs=1e-5)


@pytest.mark.parametrize('golden', FAMILIES)
def test_stablehlo_of_every_family(golden, tmp_path):
  check(golden, 'stablehlo', tmp_path)


def test_savedmodel(tmp_path, capsys):
  # The command itself reads the folder back and compares; see below for the rest.
  folder = tmp_path / 'model'
  options = ['--to', 'savedmodel', '--platforms', 'cpu,tpu', '--json']
  assert run(SOURCE, folder, *options) == 0
  record = json.loads(capsys.readouterr().out)
  assert record['difference'] < 1e-6
  about = json.loads((folder / 'assets.extra' / 'vit_jax.json').read_text())
  assert about['platforms'] == ['cpu', 'tpu']
  assert [path.name for path in tmp_path.iterdir()] == ['model']


def test_savedmodel_without_this_library(tmp_path):
  check('convnext_timm', 'savedmodel', tmp_path)


@pytest.mark.parametrize('family', classifiers())
def test_bfloat16_is_portable(family, monkeypatch):
  # No call into a library of one platform, whatever is installed here; any batch.
  def never(*_):
    raise AssertionError('a fused kernel was asked for')

  fields = models.family(family).tiny[0]
  model = models.build(family, **{'num_classes': 5, **fields}, dtype='bfloat16')
  images = jax.ShapeDtypeStruct((1, 32, 32, 3), 'float32')
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)
  variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  monkeypatch.setattr(attention, '_cudnn', never)
  loaded = weights.Loaded(model, variables, (32, 32), 3, '', None, '', '', '')
  made = program.Program(loaded, (), None)
  (batch,) = jax.export.symbolic_shape('batch')
  images = jax.ShapeDtypeStruct(made.shape(batch), 'float32')
  lower = jax.export.export(jax.jit(made.baked), platforms=['cpu', 'tpu', 'cuda'])
  exported = lower(images)
  calls = set(re.findall(r'custom_call @(\w+)', exported.mlir_module()))
  assert calls <= {'shape_assertion'}
  assert [str(x) for x in exported.out_avals] == ['float32[batch,5]']
  assert made.dtype == 'bfloat16'


def test_scanned_blocks_are_written_out(tmp_path, monkeypatch):
  load = weights.load
  monkeypatch.setattr(weights, 'load', functools.partial(load, scan=True))
  file = tmp_path / 'm.stablehlo'
  assert run(SOURCE, file, '--to', 'stablehlo', '--batch', 3) == 0
  exported = jax.export.deserialize(bytearray(file.read_bytes()))
  assert 'stablehlo.while' not in exported.mlir_module()
  assert exported.in_avals[0].shape == (3, 32, 32, 3)


def test_a_file_that_computes_something_else_is_not_left(tmp_path, capsys, monkeypatch):
  right = stablehlo.run
  off = lambda *args: {k: v * 1.01 for k, v in right(*args).items()}
  monkeypatch.setattr(stablehlo, 'run', off)
  assert run(SOURCE, tmp_path / 'm.stablehlo', '--to', 'stablehlo') == 1
  assert 'something else' in capsys.readouterr().err
  assert not list(tmp_path.iterdir())


def test_platforms_without_a_cpu_are_not_compared(tmp_path, capsys):
  options = ['--to', 'stablehlo', '--platforms', 'tpu']
  assert run(SOURCE, tmp_path / 'm.stablehlo', *options) == 0
  assert 'not compared' in capsys.readouterr().out


def test_facts_of_other_pixels():
  loaded = weights.load(SOURCE)
  timms = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
  levels = [
    [round((end - m) / s, 6) for m, s in zip(*timms.values(), strict=True)]
    for end in (0, 1)
  ]
  ops = facts.registry.parse(f'decode|resize(32)|value_range({levels[0]}, {levels[1]})')
  mean, std = facts._normalisation(ops, 3)
  np.testing.assert_allclose(mean, timms['mean'], atol=2e-6)
  np.testing.assert_allclose(std, timms['std'], atol=2e-6)
  clipped = facts.registry.parse('decode|value_range(-1, 1, 0, 100, clip=True)')
  assert facts._normalisation(clipped, 3) == (None, None)
  made = program.Program(loaded, (), 4)
  about = facts.collect(loaded, made, 'stablehlo', ['cpu'])
  assert about['input']['shape'] == [4, 32, 32, 3]
  assert about['outputs']['logits']['shape'] == [4, 10]


@pytest.mark.parametrize(
  ('name', 'options', 'expected'),
  [
    ('m.bin', ['--to', 'stablehlo'], ('m.bin', '.stablehlo')),
    ('m.onnx', ['--to', 'savedmodel'], ('m.onnx', 'folder')),
    ('no/m.stablehlo', ['--to', 'stablehlo'], ('no', 'make it first')),
    ('gs://b/m.stablehlo', ['--to', 'stablehlo'], ('gs://b/m.stablehlo', 'disk')),
    ('taken.stablehlo', ['--to', 'stablehlo'], ('taken.json', 'there already')),
    (
      'm.stablehlo',
      ['--to', 'stablehlo', '--platforms', 'cpu,gpu'],
      ('gpu', 'cuda', 'rocm'),
    ),
    ('m.tflite', ['--to', 'tflite'], ('tflite', 'savedmodel')),
    (
      'm.stablehlo',
      ['--to', 'stablehlo', '--layers', 'blok01'],
      ("'blok01'", 'block01'),
    ),
  ],
)
def test_refusals(name, options, expected, tmp_path, capsys):
  (tmp_path / 'taken.json').touch()
  place = name if '://' in name else tmp_path / name
  commands.assert_refused(export.main, capsys, (SOURCE, place, *options), expected)
  assert [path.name for path in tmp_path.iterdir()] == ['taken.json']


def test_models_that_a_file_cannot_hold(monkeypatch):
  made = program.Program(weights.load(SOURCE), (), None)
  monkeypatch.setattr(stablehlo, '_MOST_BYTES', made.params)
  with pytest.raises(export.UserError, match=naming('GiB', '--to savedmodel')):
    stablehlo.check(made)


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
