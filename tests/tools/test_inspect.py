import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tests.support import commands, naming
from vit_jax import cli, models
from vit_jax.tools.inspect import __main__ as inspect
from vit_jax.tools.inspect import activations, flops, paper_table, swin_table, vpt_table
from vit_jax.weights import zoo


@pytest.mark.slow
def test_the_command_line():
  command = [sys.executable, '-m', 'vit_jax.tools.inspect', 'vit:B/16', '--json']
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  record = json.loads(done.stdout.splitlines()[-1])
  assert record['params'] == 86567656
  assert record['gflops'] == pytest.approx(35.1, rel=0.01)
  assert record['tokens'] == 197
  assert record['exaflops'] is None
  assert done.stderr == ''


def assert_near_the_paper(rows):
  for row in rows:
    # The paper counts the ResNets otherwise: see the notes of the table.
    tolerance = 0.05 if row['model'].startswith('bit') else 0.03
    assert row['ratio'] == pytest.approx(1, abs=tolerance), row
    assert row['ratio'] == row['ours'] / row['paper']


def test_the_compute_of_the_paper():
  # Every patch size, depth 12 and 24, a ResNet and a hybrid; `make test-slow` has all.
  quick = {'vit:B/16', 'vit:L/32', 'vit:H/14', 'bit:R50x1', 'vit:R50+B/16'}
  rows = paper_table.rows(quick)
  assert len(rows) == 5
  assert_near_the_paper(rows)


@pytest.mark.slow
def test_the_table_of_the_paper(capsys):
  code, out, err = run(capsys, '--table', 'paper', '--json')
  assert (code, err) == (0, '')
  rows = json.loads(out)['rows']
  assert len(rows) == 18
  assert_near_the_paper(rows)
  code, out, err = run(capsys, '--table', 'paper')
  for row in rows:
    assert f'{row["ratio"]:.3f}  {row["model"]}' in out


def test_the_table_of_the_swin_paper():
  rows = swin_table.rows({'vit:B/16', 'swin:B'})  # `make test-slow` has all
  assert [row['params'] for row in rows] == [86_859_496, 87_768_224]
  assert [row['paper'] for row in rows] == [55.4, 15.4]
  assert all(row['ratio'] == pytest.approx(1, abs=0.005) for row in rows)


@pytest.mark.slow
def test_the_whole_table_of_the_swin_paper(capsys):
  code, out, err = run(capsys, '--table', 'swin', '--json')
  assert (code, err) == (0, '')
  rows = json.loads(out)['rows']
  assert [row['paper'] for row in rows] == [204.6, 840.5, 55.4, 190.7, 15.4, 47, 103.9]
  assert all(row['ratio'] == pytest.approx(1, abs=0.005) for row in rows)
  code, out, err = run(capsys, '--table', 'swin')
  for row in rows:
    assert f'{row["ratio"]:.3f}{row["top1"]:>8.1f}  {row["model"]}' in out


def assert_as_the_paper_prints(rows):
  for row in rows:
    if row['paper']:
      assert f'{row["ratio"]:.2f}' == f'{row["paper"]:.2f}', row['name']


def test_the_table_of_vpt():
  (model, classes, methods, printed), *_ = vpt_table.TABLES
  assert (len(classes), sum(classes)) == (24, 2113)
  quick = [row for row in methods if row.paper and row.name != 'side']
  rows = vpt_table.rows([(model, classes, quick, printed)])  # `make test-slow` has all
  assert_as_the_paper_prints(rows)
  tuned = {row['name']: row['tuned'] for row in rows}
  assert tuned == {
    'full': 85_798_656,
    'linear': 0,
    'partial-1': 7_089_408,
    'mlp-3': 1_184_256,
    'bias': 102_912,
  }


@pytest.mark.slow
def test_the_whole_table_of_vpt(capsys):
  code, out, err = run(capsys, '--table', 'vpt', '--json')
  assert (code, err) == (0, '')
  rows = json.loads(out)['rows']
  assert_as_the_paper_prints(rows)
  assert len([row for row in rows if row['paper']]) == 16
  # What the paper prints for prompts, with a number of them chosen for each task.
  for model, ratio in (('convnext:B', 1.02), ('resnet:50', 1.09)):
    pads = [r['ratio'] for r in rows if r['model'] == model and 'pad' in r['name']]
    assert min(pads) < ratio < max(pads)
  for row in rows:  # in closed form
    method, _, number = row['name'].rpartition(', ')
    if method in ('vpt shallow', 'vpt deep'):
      assert row['tuned'] == int(number) * 768 * (12 if method == 'vpt deep' else 1)
    if method == 'vpt pad':
      p = int(number)
      assert row['tuned'] == 3 * 2 * p * (224 + 2 * p) + 3 * 224 * 2 * p
    if method == 'lora':
      rank = int(number.split()[1])
      assert row['tuned'] == 12 * 2 * rank * (768 + 768)
  code, out, err = run(capsys, '--table', 'vpt')
  assert 'side                             9,547,585    3.690     3.69' in out


@pytest.mark.slow
def test_operations_of_a_vit_by_hand():
  # Ti/16 at 64 x 32 px: 8 patches and a cls token, D 192, MLP 768, 12 layers.
  N, D, hidden = 9, 192, 768
  block = 4 * N * D * D + 2 * N * N * D + 2 * N * D * hidden  # multiply-adds
  total = 8 * (16 * 16 * 3) * D + 12 * block + D * 10
  record = inspect.inspect_model('vit:Ti/16', (64, 32), 10)
  assert record['gflops'] == 2 * total / 1e9
  assert record['tokens'] == N


@pytest.mark.slow
def test_modules_add_up():
  record = inspect.inspect_model('vit:S/16', fields={'classifier': 'map'})
  assert sum(record['modules'].values()) == record['params'] == 23823976
  assert list(record['modules']) == [
    'MAPHead_0',
    'Transformer/encoder_norm',
    'Transformer/encoderblock_* (x12)',
    'Transformer/posembed_input',
    'embedding',
    'head',
  ]


@pytest.mark.slow
def test_stages_of_a_resnet_are_told_apart():
  fields = {'blocks': (1, 1, 1, 1)}
  modules = inspect.inspect_model('BiT-R50x1', (32, 32), fields=fields)['modules']
  assert [name for name in modules if 'block' in name] == [
    *(f'block{i}' for i in (1, 2, 3, 4)),
    'root_block',
  ]


@pytest.mark.slow
def test_operations_of_a_resnet_50():
  model = models.build('resnet_gn:R50', num_classes=1000)
  images = jax.ShapeDtypeStruct((1, 224, 224, 3), 'float32')
  # Table 1 of the ResNet paper gives a ResNet-50 3.8e9 multiply-adds, its stride in the
  # first 1x1 convolution of a stage; in the 3x3 one, as here, it has 4.1e9.
  # Of init too, which multiplies nothing but what the model does.
  forward = lambda x: model.init_with_output(jax.random.key(0), x)[0]
  operations = flops.count(forward, images)
  assert operations / 1e9 == pytest.approx(2 * 4.1, rel=0.01)


@pytest.mark.slow
def test_scan_changes_nothing_but_names_and_remat_saves_memory():
  def tiny(**fields):
    return inspect.inspect_model('vit:mu/16', (64, 64), fields={'depth': 4, **fields})

  plain, scan, remat = tiny(), tiny(scan=True), tiny(remat='full')
  for key in ('params', 'gflops', 'memory'):
    assert plain[key] == scan[key]
  assert remat['gflops'] == plain['gflops']
  # Of each of 4 blocks one array of the width in place of 9; the rest are patches and head.
  assert remat['memory']['activations'] < 0.5 * plain['memory']['activations']


@pytest.mark.slow
def test_memory():
  # sin(x w): the backward pass needs x, an input, and cos(x w).
  f = lambda w, x: jnp.sin(x @ w).sum()
  w, x = (
    jax.ShapeDtypeStruct((4, 5), 'float32'),
    jax.ShapeDtypeStruct((3, 4), 'float32'),
  )
  assert activations.saved_bytes(f, w, x) == 4 * 3 * 5
  one = inspect.inspect_model('vit:mu/16', (32, 32), 10)
  memory = inspect.inspect_model('vit:mu/16', (32, 32), 10, batch=8)['memory']
  assert memory['params'] == memory['gradients'] == 4 * one['params']
  assert memory['optimizer'] == 8 * one['params']
  # The scale of the final norm, of width 32, is kept broadcast, whatever the batch.
  fixed = 32 * 4
  assert memory['activations'] - fixed == 8 * (one['memory']['activations'] - fixed)
  assert memory['total'] == 16 * one['params'] + memory['activations']


@pytest.mark.slow
def test_the_estimate_of_activations_is_near_what_xla_allocates():
  model = models.build('vit:mu/16', depth=6, scan=True)
  images = jax.ShapeDtypeStruct((8, 160, 160, 3), 'float32')
  params = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  loss = lambda params, images: model.apply({'params': params}, images)[0].sum()
  compiled = jax.jit(jax.grad(loss)).lower(params, images).compile()
  saved = activations.saved_bytes(loss, params, images)
  patches = 4 * images.size  # CPUs cut them out once more for the gradient
  # Working space comes on top, that of one block of 6; XLA may fuse a little away.
  assert 0.9 < compiled.memory_analysis().temp_size_in_bytes / (saved + patches) < 1.3


def run(capsys, *argv):
  return commands.run(inspect.main, capsys, *argv)


@pytest.mark.thorough
def test_the_report(capsys):
  code, out, err = run(
    capsys,
    'vit_small_patch16_224',
    *('--resolution', '96x64', '--classes', '0', '--set', 'classifier=gap'),
    *('--examples', '1e6', '--epochs', '2.5', '--batch', '4'),
  )
  assert (code, err) == (0, '')
  assert '96x64 px' in out
  assert '2.5e+06 images' in out
  assert 'at batch 4' in out
  assert 'head' not in out


def test_examples_of_a_training(capsys):
  tiny = ('vit:mu/16', '--resolution', '32', '--json')
  by_steps = run(capsys, *tiny, '--steps', '100', '--batch', '50')[1]
  by_epochs = run(capsys, *tiny, '--examples', '1000', '--epochs', '5')[1]
  a, b = (json.loads(out) for out in (by_steps, by_epochs))
  assert a['examples'] == b['examples'] == 5000
  assert a['exaflops'] == b['exaflops'] == pytest.approx(3 * a['gflops'] * 5000 / 1e9)


@pytest.mark.parametrize(
  ('argv', 'facts'),
  [
    (['vit:X/16'], ("'X/16'", 'B/16')),
    (['vti:B/16'], ("'vti'", 'vit')),
    (['vit:B/16', '--resolution', '225'], ('225x225', '16x16')),
    (['vit:B/16', '--resolution', '0'], ('--resolution', "'0'")),
    (['vit:B/16', '--batch', '0'], ('--batch',)),
    (['vit:B/16', '--batch', 'many'], ('--batch', "'many'")),
    (['vit:B/16', '--set', 'clasifier=map'], ("'clasifier'", 'classifier')),
    (['vit:B/16', '--set', 'classifier'], ('--set', 'classifier', 'FIELD=VALUE')),
    (['vit:B/16', '--epochs', '7'], ('--epochs', '--examples')),
    (['vit:B/16', '--steps', '7', '--examples', '7'], ('--steps', '--examples')),
    ([], ('model',)),
    (['--tpu', 'v3:2x2'], ('--tpu', '--config')),
    (['runs/nothing'], ('runs/nothing', '--config')),
    (['configs/digits.py:debug'], ('--config configs/digits.py:debug',)),
    (['vit_b16'], ('--config vit_b16',)),
    (['--table', 'papr'], ("'papr'", 'paper')),
    (['--table', 'paper', 'vit:B/16'], ('--table', 'vit:B/16')),
    (['--table', 'paper', '--batch', '2'], ('--table', '--batch')),
    (['vit:B/16', '--jsn'], ('--jsn',)),
  ],
)
def test_mistakes_end_with_one_line_and_exit_code_2(capsys, argv, facts):
  commands.assert_refused(inspect.main, capsys, argv, facts)


def test_zoo_lists_every_name(capsys):
  assert cli.run(inspect.main, ['--zoo']) == 0
  text = capsys.readouterr().out
  assert all(f'\n{name} ' in text for name in zoo.ENTRIES)
  assert cli.run(inspect.main, ['--zoo', '--json']) == 0
  listed = json.loads(capsys.readouterr().out.splitlines()[-1])['zoo']
  assert [entry['name'] for entry in listed] == list(zoo.ENTRIES)
  assert {'url', 'format', 'resolution', 'value_range', 'licence'} <= listed[0].keys()
  assert cli.run(inspect.main, ['vit:B/16', '--zoo']) == 2
  assert re.search(naming('--zoo', 'vit:B/16'), capsys.readouterr().err)
