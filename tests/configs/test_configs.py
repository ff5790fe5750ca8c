"""Every recipe in configs/, by its file, so that a new one is tested as it is added."""

import re
import shlex

import pytest
from PIL import Image

from tests.support import GOLDEN, naming, runs
from vit_jax import config, models
from vit_jax.errors import UserError
from vit_jax.train import program, schema
from vit_jax.train import run as train

CONFIGS = list(config.recipes().values())
every_config = pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
  monkeypatch.chdir(runs.ROOT)


# Most other tests run digits (see `runs`); some recipes are started below.
QUICK = {'vit_b16'}


@pytest.mark.parametrize(
  'path',
  [
    pytest.param(path, marks=[] if path.stem in QUICK else pytest.mark.slow)
    for path in CONFIGS
  ],
  ids=lambda path: path.stem,
)
def test_debug_runs_end_to_end(path, tmp_path, monkeypatch):
  runs.on_one_device(monkeypatch)
  workdir = tmp_path / 'run'
  c = config.load(f'{path}:debug')
  status, rows = train.train(c, workdir)
  runs.assert_finished(status, rows, c['evals'])
  assert status == runs.status(workdir)
  assert rows[0].keys() >= {'step'}
  assert str(status['step']) in runs.saved(workdir)


RCNN = [
  *('R50-FPN,times=1', 'R50-DC5,masks=False,times=9', 'swin:T', 'vitdet:B'),
  *('vitdet:H,cascade=True', 'swin:L,lsj=True'),
]


@pytest.mark.parametrize(
  'spec',
  [
    *('mae_i1k', 'masked_patches', 'detr_coco', 'finetune', 'linear_seg'),
    *('dino_i1k', 'dinov2_i1k', 'dino_continue'),
    'rcnn_digits',
    'detect.py:debug,masks=True',
    f'mae_finetune_i1k.py:debug,probe=True,weights={GOLDEN}/mae_hf,res=32',
    *(f'rcnn_coco.py:debug,variant={variant}' for variant in RCNN),
  ],
)
def test_debug_starts(spec, tmp_path, monkeypatch):
  runs.on_one_device(monkeypatch)
  c = config.load(f'configs/{spec}' if ':' in spec else f'configs/{spec}.py:debug')
  runs.until_the_first_step(monkeypatch, c, tmp_path)


DETECTOR = f'{GOLDEN}/twostage/mask_rcnn_torchvision'


@pytest.mark.parametrize('masks', [False, True])
def test_a_detector_starts_with_heads_for_the_classes_of_the_data(
  masks, tmp_path, monkeypatch, capsys
):
  runs.on_one_device(monkeypatch)
  more = f'weights={DETECTOR},masks={masks},channels=3,freeze=stem'
  c = config.load(f'configs/detect.py:debug,{more}')
  runs.until_the_first_step(monkeypatch, c, tmp_path)
  out = capsys.readouterr().out
  (line,) = re.findall('initialised afresh: (.*)', out)
  # The mask head has two parameters.
  box, more = r'box_head0/[\w/]+', ' and 2 more' if masks else ''
  assert re.fullmatch(f'{box}(, {box}){{3}}{more}', line)
  assert 'rcnn R50-FPN' not in out


# {(height, width): number of images} -> the canvas.
CANVASES = [
  ({(120, 160): 9, (160, 120): 1}, '', '(128, 160)'),
  ({(120, 160): 6, (160, 120): 4}, '', '(160, 160)'),
  ({(120, 160): 9, (160, 120): 1}, ',aspect=0.5', '(160, 64)'),
  ({}, '', '(160, 160)'),
]


@pytest.mark.parametrize(('sizes', 'more', 'canvas'), CANVASES)
def test_the_canvas_of_a_detector_follows_the_images(sizes, more, canvas, tmp_path):
  every = [size for size, number in sizes.items() for _ in range(number)]
  folder = tmp_path / 'images' / 'train'
  folder.mkdir(parents=True)
  (tmp_path / 'classes.txt').write_text('cat')
  (folder / 'bad.png').write_bytes(b'no image')
  for i, (height, width) in enumerate(every):
    Image.new('L', (width, height)).save(folder / f'{i}.png')
  c = config.load(f'detect:data=yolo:{tmp_path},res=160{more}')
  assert f'|canvas({canvas})|' in c['data']['pp']


@pytest.mark.parametrize(
  ('arg', 'facts'),
  [
    ('data=yolo:x,weights=y', ('data=yolo:x', 'boxes', '--config=detect')),
    (f'data=digits,weights={DETECTOR}', ('mask_rcnn_torchvision', '--config=detect')),
  ],
)
def test_boxes_and_detectors_are_refused_by_finetune(arg, facts, tmp_path, monkeypatch):
  runs.on_one_device(monkeypatch)
  with pytest.raises(UserError, match=naming(*facts)):
    train.train(config.load(f'configs/finetune.py:{arg}'), tmp_path)


@pytest.mark.parametrize('data', ['{}', 'folder:{}'])
def test_a_folder_without_its_format_is_refused_by_detect(data, tmp_path):
  with pytest.raises(UserError, match=naming(f'yolo:{tmp_path}')):
    config.load(f'configs/detect.py:data={data.format(tmp_path)}')


@pytest.mark.parametrize(
  ('arg', 'facts'),
  [
    ('aspect=-1', ('aspect=-1.0',)),
    ('task=detect,masks=True', ('masks=True', 'task=rcnn')),
  ],
)
def test_arguments_of_detect_that_do_not_fit_are_refused(arg, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    config.load(f'configs/detect.py:debug,{arg}')


def named(c):
  """Returns a config; with a model if its weights would name it."""
  if not c.get('weights') or 'name' in c['model']:
    return c
  model = {'name': 'vit', 'variant': 'B/16'}
  if c['task']['name'] == 'rcnn':
    model = {'name': 'rcnn', 'variant': 'R50-FPN'}
  return {**c, 'model': {**model, **c['model']}}


@every_config
def test_the_recipe_itself_is_sound(path):
  c = schema.check(named(config.load(str(path))))
  model = models.build(**{'num_classes': 10, **c['model']})
  size = re.search(r'(?:crop|resize|resize_as_weights)\((\d+)', c['data']['pp'])
  # One block of each stage is traced, not forty.
  body = model
  while body.backbone:
    body = body.backbone
  stages = {
    n: (1,) * len(getattr(body, n)) for n in ('depths', 'blocks') if hasattr(body, n)
  }
  model = model.change(scan=True, **stages)
  side = int(size[1]) if size else 8
  params = model.shapes((side, side, 3))['params']
  assert {'head', 'box_head0'} & params.keys()


@every_config
def test_the_docstring_has_commands_that_work(path):
  docstring = path.read_text().split('"""')[1]
  title, _, rest = docstring.partition('\n')
  assert title.endswith('.')
  commands = re.findall(r'^ +(vit_jax train .*)$', rest, re.MULTILINE)
  its_name = re.compile(rf'--config={path.stem}\b')
  assert any(map(its_name.search, commands))
  for command in commands:
    _, c, _ = program.parse(shlex.split(command, comments=True)[2:])
    schema.check(named(c))


@every_config
def test_what_is_held_out_chooses_the_best_step(path):
  c = config.load(str(path))
  if 'val' in c['evals']:
    assert c['checkpoint']['best'].partition('/')[0] in ('val', 'minival')


@pytest.mark.parametrize(
  ('arg', 'warmup'),
  [('', 100), ('steps=1_000', 100), ('steps=20', 2), ('steps=5', 0)]
  + [('steps=20,warmup=7', 7)],
)
def test_a_short_run_on_a_folder_warms_up_in_a_tenth_of_it(arg, warmup):
  c = config.load(f'folder:{arg}')
  assert c['optim']['schedule']['warmup'] == warmup
