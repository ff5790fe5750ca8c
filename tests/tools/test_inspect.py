"""`vit_jax inspect`: models, recipes, files and runs."""

import json
import re

import jax
import numpy as np
import pytest

from tests.support import GOLDEN, commands, naming, runs
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.tools.inspect import __main__ as inspect
from vit_jax.tools.inspect import model, recipe, source, tpu
from vit_jax.train import flops
from vit_jax.train.workdir import lock
from vit_jax.weights import zoo

CONFIGS = sorted(
  {*(runs.ROOT / 'configs').glob('*.py')} - {runs.ROOT / 'configs/common.py'}
)


def run(capsys, *argv):
  return commands.run(inspect.main, capsys, *argv)


def record_of(capsys, *argv):
  code, out, err = run(capsys, *argv, '--json')
  assert (code, err, out.count('\n')) == (0, '', 1)
  return json.loads(out)


# --- models ----------------------------------------------------------------------------


def test_the_command_line(capsys):
  record = record_of(capsys, 'vit:Ti/16')
  assert record['params'] == 5_717_416
  assert record['tokens'] == 197
  assert record['exaflops'] is None


def test_operations_of_a_vit_by_hand():
  # Ti/16 at 64 x 32 px: 8 patches and a class token, D 192, MLP 768, 12 layers.
  N, D, hidden = 9, 192, 768
  block = 4 * N * D * D + 2 * N * N * D + 2 * N * D * hidden  # multiply-adds
  total = 8 * (16 * 16 * 3) * D + 12 * block + D * 10
  record = model.describe('vit:Ti/16', (64, 32), 10)
  assert record['gflops'] == 2 * total / 1e9
  assert record['tokens'] == N


def test_modules_add_up():
  record = model.describe('vit:S/16', fields={'classifier': 'map'})
  assert sum(record['modules'].values()) == record['params'] == 23823976
  assert 'Transformer/encoderblock_* (x12)' in record['modules']
  tiny = model.describe('BiT-R50x1', (32, 32), fields={'blocks': (1, 1, 1, 1)})
  assert [name for name in tiny['modules'] if 'block' in name] == [
    *(f'block{i}' for i in (1, 2, 3, 4)),
    'root_block',
  ]


def test_operations_of_a_resnet_50():
  resnet = models.build('resnet_gn:R50', num_classes=1000)
  images = jax.ShapeDtypeStruct((1, 224, 224, 3), 'float32')
  # Table 1 of the ResNet paper gives a ResNet-50 3.8e9 multiply-adds, its stride in the
  # first 1x1 convolution of a stage; in the 3x3 one, as here, it has 4.1e9.
  forward = lambda x: resnet.init_with_output(jax.random.key(0), x)[0]
  operations = flops.count(forward, images)
  assert operations / 1e9 == pytest.approx(2 * 4.1, rel=0.01)


def test_scan_changes_only_names():
  tiny = lambda **fields: model.describe('vit:mu/16', (64, 64), fields=fields)
  plain, scan = tiny(depth=4), tiny(depth=4, scan=True)
  assert (plain['params'], plain['gflops']) == (scan['params'], scan['gflops'])


def test_the_report(capsys):
  argv = ('vit_tiny_patch16_224', '--resolution', '96x64', '--classes', '0')
  argv += ('--set', 'classifier=gap', '--examples', '2.5e6')
  code, out, err = run(capsys, *argv)
  assert (code, err) == (0, '')
  assert re.search(naming('96x64 px', '2.5e+06 images'), out)
  assert 'head' not in out
  record = record_of(capsys, *argv)
  assert record['exaflops'] == pytest.approx(3 * record['gflops'] * 2.5e6 / 1e9)


def test_zoo_lists_every_name(capsys):
  code, out, _ = run(capsys, '--zoo')
  assert code == 0
  assert all(f'\n{name} ' in out for name in zoo.ENTRIES)
  listed = record_of(capsys, '--zoo')['zoo']
  assert [entry['name'] for entry in listed] == list(zoo.ENTRIES)


# --- recipes ---------------------------------------------------------------------------


@pytest.mark.parametrize('name', [path.stem for path in CONFIGS])
def test_every_config(capsys, name):
  path = runs.ROOT / f'configs/{name}.py'
  record = record_of(capsys, '--config', f'{path}:debug', '--examples', '10000')
  assert record['examples'] == record['steps'] * record['batch_size'] > 0
  assert record['exaflops'] == pytest.approx(
    3 * record['gflops'] * record['examples'] / 1e9
  )
  assert record['epochs'] == record['examples'] / record['train_examples']


def b16(arguments=''):
  return ['--config', f'{runs.ROOT}/configs/vit_b16.py{arguments}']


def test_imagenet_21k_by_hand(capsys):
  images = 14_197_122 - 102_400  # full[102400:]
  flags = ('--config.model.num_classes=21843', '--examples', images)
  record = record_of(capsys, *b16(':variant=L/16,batch=1024'), *flags)
  assert record['steps'] == round(90 * images / 1024)
  assert (record['model'], record['resolution']) == ('vit:L/16', [224, 224])
  # More than with the paper's 1,000 classes and no hidden layer
  assert record['params'] > 304_326_632


def test_memory_on_a_mesh(capsys):
  argv = ('--config', f'{runs.ROOT}/configs/digits.py:debug', '--mesh', 'data=4')
  pp = '--config.data.pp=resize(16)|value_range(-1, 1)'
  record = record_of(capsys, *argv, '--config.model.depth=1', pp)
  memory = record['memory']
  assert memory['devices'] == 4
  assert memory['mesh'] == {'data': 4, 'fsdp': 1, 'tensor': 1}
  # Parameters, their average and two moments, float32, and a quarter of a small batch.
  state = 4 * 4 * record['params']
  assert state < memory['argument_bytes'] < 1.01 * state
  assert memory['temp_bytes'] > 0


def test_a_step_on_two_meshes():
  mesh = {'data': 1, 'fsdp': 16, 'tensor': 1}
  facts = dict(mesh=mesh, bytes=7 * 2**30, temp_bytes=6 * 2**30, cycles=345_300_000)
  facts |= dict(step_s=0.2365, alone_s=0.0067, collectives={'all-gather': 99})
  other = dict(mesh=mesh | {'data': 16, 'fsdp': 1}, why='18.20 GiB')
  text = tpu.render(
    dict(tpu='v5e:4x4', devices=16, hbm=2**34, hours=9.5, other=other, **facts)
  )
  assert 'fsdp=16 fits in 7.00 GiB (temporaries 6.00 GiB): 345.3 M cycles' in text
  assert '6.7 ms of collectives, 236.5 ms' in text
  assert 'data=16 does not fit (18.20 GiB)' in text
  assert 'another' not in tpu.render(
    facts | dict(tpu='', devices=1, hbm=0, hours=1, other=None)
  )


def test_a_step_that_fits_on_another_mesh_alone(monkeypatch):
  memory = iter((2**40, 2**30))
  program = 'ENTRY %main () -> f32[] {\n}'
  facts = lambda *_: dict(text=program, bytes=next(memory), temp_bytes=0)
  monkeypatch.setattr(tpu, 'devices', lambda text: jax.devices())
  monkeypatch.setattr(tpu, 'compiled', facts)
  config = recipe.load(f'{runs.ROOT}/configs/digits.py:debug', ['model.depth=1'])
  facts = ('data=8 does not fit', 'Try --config.mesh.data=1 --config.mesh.fsdp=8.')
  with pytest.raises(UserError, match=naming(*facts)):
    tpu.inspect(config, recipe.describe(config, None), 'v5e:2x4')


@pytest.mark.parametrize(
  ('name', 'beside'),
  [
    ('detr_coco', {'image_mask': [[1344, 1344], 'uint8']}),
    ('vitdet_digits:head=segment', {'segments': [[64, 64], 'uint8']}),
  ],
)
def test_objects_are_padded_as_the_pipeline_says(name, beside):
  config = recipe.load(name, [])
  _, spec = recipe.trace(config, recipe.open_bundled(config['data']))
  most = 100 if name == 'detr_coco' else 4
  others = spec.keys() - {'image', 'mask', 'index'}
  assert {x: [list(spec[x].shape[1:]), str(spec[x].dtype)] for x in others} == {
    'boxes': [[most, 4], 'float32'],
    'boxes_mask': [[most], 'float32'],
    'label': [[most], 'int32'],
    'label_mask': [[most], 'float32'],
    **beside,
  }


@pytest.mark.parametrize(
  ('pp', 'shape'),
  [
    ('decode|inception_crop(224)|value_range(-1, 1)', (224, 224, 3)),
    ('decode(1)|resize((8, 12))|value_range(-1, 1)', (8, 12, 1)),
    ('decode|resize_small(9)|central_crop(size=8)|value_range(0, 1)', (8, 8, 3)),
    ('decode|resize(9)|random_crop(8, padding=2)|value_range(0, 1)', (8, 8, 3)),
  ],
)
def test_the_size_of_images(pp, shape):
  data = dict(source='folder:nowhere', pp=pp, batch_size=2)
  _, spec = recipe.trace({'data': data}, None)
  assert spec['image'].shape == (2, *shape)


def test_weights_that_name_the_model(capsys):
  path = f'{runs.ROOT}/configs/finetune.py'
  argv = ('--config', path, '--examples', '50000')
  assert record_of(capsys, *argv)['model'] == 'vit:B/16'
  code, _, err = run(capsys, '--config', f'{path}:weights=/not/there.npz')
  assert code == 2
  assert '--config.model.variant=B/16' in err


# --- files and runs --------------------------------------------------------------------


def test_a_file_of_weights(capsys):
  path = GOLDEN / 'vit_google_token.npz'
  code, out, _ = run(capsys, path)
  assert code == 0
  assert re.search(naming('google vit', '32x32', '67,594', 'depth=3'), out)
  # Blocks that are alike are one row.
  assert re.search(r'encoderblock_0/MlpBlock_0/Dense_0/kernel +\(48, 96\) x3\n', out)
  record = record_of(capsys, path)
  assert record['params'] == 67594
  with np.load(path) as file:
    assert record['shapes']['head/kernel'] == list(file['head/kernel'].shape)
    assert len(record['shapes']) == len(file.files)


def test_fields_that_a_file_does_not_tell(capsys, tmp_path):
  (tmp_path / 'model.safetensors').symlink_to(GOLDEN / 'vit_timm' / 'model.safetensors')
  code, _, err = run(capsys, tmp_path)
  assert code == 2
  assert re.search(naming('num_heads'), err)
  record = record_of(capsys, tmp_path, '--set', 'num_heads=4')
  assert record['fields']['num_heads'] == 4


def test_a_run(capsys, short_run):
  record = record_of(capsys, short_run)
  assert record['config'] == json.loads((short_run / 'config.json').read_text())
  newest = record['steps'][-1]
  assert (record['step'], record['state']) == (newest['step'], 'finished')
  assert record['best'] in [row['step'] for row in record['steps']]
  assert record['params'] == record['trained']
  assert record['class_names'] == [str(i) for i in range(10)]
  code, out, _ = run(capsys, short_run)
  assert code == 0
  facts = ('run vit', 'digits', 'adamw', '10: 0, 1', 'finished', 'the best')
  assert re.search(naming(*facts), out)


def test_a_killed_run_is_interrupted(capsys, short_run, tmp_path):
  for name in ('config.json', 'checkpoints'):
    (tmp_path / name).symlink_to(short_run / name)
  status = json.loads((short_run / 'status.json').read_text())
  status |= {'state': 'running'}
  (tmp_path / 'status.json').write_text(json.dumps(status))
  state = lambda: source.describe(str(tmp_path), {})['state']
  assert state() == 'running'  # without a lock nobody knows
  with lock(tmp_path):
    assert state() == 'running'
  assert state() == 'interrupted'
  assert re.search(r'state +interrupted: ', run(capsys, tmp_path)[1])
  (tmp_path / 'status.json').write_text('')  # damaged: the rest is shown
  assert run(capsys, tmp_path)[0] == 0
