"""Command lines that tools refuse: one line that names why, exit code 2, no new file."""

import importlib.util
import shlex
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.support import GOLDEN, commands, pairs
from vit_jax.__main__ import COMMANDS

# Names of goldens in the folder that the commands run in; `places` adds the others.
GOLDENS = {
  'token.npz': 'vit_google_token.npz',
  'mixer.npz': 'mixer_google.npz',
  'bit.npz': 'bit_timm.npz',
  'pair.npz': 'siglip_bigvision.npz',
}
SMALL = "--pp 'decode|resize(8)|value_range(-1, 1)'"
DIGITS = '--data digits --split test'
PIXELS = f"{DIGITS} --pp 'value_range(-1, 1)'"
EMBED = 'token.npz photos --out f.parquet'
MIXER = 'mixer.npz me/mine --dry_run --out'

# (command, arguments, words of its error)
REFUSED = [
  ('bench', 'vit:X/16', ("'X/16'", 'B/16')),
  ('bench', 'vit:mu/16 --dtype float23', ("'float23'", 'float32')),
  ('bench', 'vit:mu/16 --tune rank=8', ('--tune', 'method')),
  ('bench', 'vit:mu/16 --set num_classes=None --mode train', ('num_classes',)),
  # The tools read the weights, the images and the layer that they are given.
  ('predict', 'nowhere.npz photos', ("'nowhere.npz' is no file", '--zoo')),
  ('predict', 'headless.npz photos', ('headless.npz', 'head', 'embed')),
  ('predict', 'token.npz drawings', ('drawings', '1 .svg', '.png')),
  ('predict', "token.npz photos --pp 'decode|flip_lr'", ('flip_lr', 'value_range')),
  ('predict', f'token.npz photos {SMALL}', ('(8, 8, 3)', '(32, 32, 3)')),
  ('predict', 'token.npz photos --resolution 6', ('6x6', '8x8')),
  ('predict', 'token.npz photos --draw boxes', ('--draw', 'detectors', 'token.npz')),
  ('predict', 'token.npz photos --threshold 50', ('--threshold 50', '0 to 1')),
  ('predict', 'token.npz photos --topk 3', ('--topk 3', 'mean "--top"', '--help')),
  ('predict', 'token.npz photos --csv table.txt', ('--csv', 'table.txt', '.csv')),
  ('predict', 'token.npz photos --csv photos/a.png/t.csv', ('--csv', 'a.png')),
  ('predict', 'token.npz photos --class_names token.npz', ('token.npz', 'UTF-8')),
  ('predict', 'token.npz photos --class_names none.txt', ('none.txt', 'No such')),
  ('predict', 'token.npz photos --class_names names.txt', ('names.txt', 2, 10)),
  ('embed', 'token.npz photos --out f.csv', ('f.csv', '.parquet')),
  ('embed', 'token.npz photos/a.png --out f.parquet', ('a.png', 'folder')),
  ('embed', f'{EMBED} --layer blok01', ('blok01', 'block01')),
  ('embed', f'{EMBED} --layer pre_logits,stem', ('pre_logits', 'stem')),
  ('embed', 'vit_base_patch16_224 photos --out f.parquet', ('vit_base_patch16_224',)),
  ('embed', 'token.npz broken --out f.parquet', (3,)),
  ('search', 'none.parquet photos', ('none.parquet',)),
  ('search', 'text.parquet photos', ('text.parquet', 'damaged')),
  ('search', 'plain.parquet photos', ('plain.parquet', 'embed')),
  ('search', 'plain.parquet', ('near_duplicates',)),
  ('search', 'plain.parquet --near_duplicates 0', ('near_duplicates', 0)),
  ('search', 'plain.parquet --near_duplicates .5 --page /', ('--page', 'folder')),
  # Evaluations and probes.
  ('evaluate', 'token.npz', ('token.npz', '--data', '--split')),
  ('evaluate', 'token.npz --data digits --split tset', ("'tset'", 'test')),
  ('evaluate', 'token.npz --data folder:no_such --split val', ('no_such',)),
  ('evaluate', f'token.npz {DIGITS} {SMALL} --out new', ('(8, 8, 3)', '(32, 32, 3)')),
  ('evaluate', f'token.npz {DIGITS} --out /proc/no/such', ('--out', '/proc/no')),
  ('evaluate', f'token.npz {DIGITS} --out taken/new', ('--out', 'taken')),
  ('evaluate', 'token.npz --data arrays:labels.npz --split test --out new',
   ('labels', '--out')),
  ('evaluate', f'token.npz --probe nkk {DIGITS}', ("'nkk'", 'knn', 'linear_probe')),
  ('evaluate', 'token.npz --probe knn', ('--data', 'knn')),
  ('evaluate', 'token.npz --probe knn --data digits', ('--split',)),
  ('evaluate', f'token.npz --probe knn {DIGITS} --out x', ('--out', '--probe')),
  ('evaluate', f'token.npz --probe knn {DIGITS} --set type=fewshot',
   ('--probe fewshot',)),
  ('evaluate', f'token.npz --probe knn {PIXELS} --set n=3', ('knn.n', 'temperature')),
  ('evaluate', f'token.npz --probe knn {PIXELS} --val train', ('digits.val', 'test')),
  ('evaluate', f'token.npz --probe knn {PIXELS}', ('(8, 8, 1)', '(32, 32, 3)')),
  ('evaluate', f'token.npz {PIXELS} --set k=[3]', ('--set', '--probe')),
  # Labels go with a text tower.
  ('predict', 'pair.npz photos', ('--labels',)),
  ('predict', "pair.npz photos --templates 'my {}'", ('--labels',)),
  ('evaluate', f'pair.npz {DIGITS}', ('--zero_shot',)),
  ('evaluate', 'pair.npz --data digits --zero_shot --probe knn',
   ('--probe', '--zero_shot')),
  ('convert', 'token.npz x.npz --labels a,b', ('token.npz', 'text tower')),
  ('predict', 'words/pair.npz photos --labels a,dog', ('tokenizer.json', 999)),
  ('predict', 'words/pair.npz photos --labels a,caf\udce9', ('udce9', 'UTF-8')),
  # Other files.
  ('convert', 'token.npz x.onnx --to timm', ('x.onnx', '--to timm', 'torch.onnx.export')),
  ('convert', 'token.npz x.pt --to timm', ('x.pt', '.safetensors')),
  ('convert', 'token.npz mine/x.safetensors --to timm', ('mine/config.json',)),
  ('convert', 'token.npz no/x.npz', ('no',)),
  ('convert', 'token.npz x.npz --to timm', ('x.npz', 'google')),
  ('convert', 'token.npz x', ('x', '.npz')),
  ('export', 'token.npz m.bin --to stablehlo', ('m.bin', '.stablehlo')),
  ('export', 'token.npz m.onnx --to savedmodel', ('m.onnx', 'folder')),
  ('export', 'token.npz taken/m.stablehlo --to stablehlo', ('DEST', 'taken')),
  ('export', 'token.npz mine/config.stablehlo --to stablehlo',
   ('config.json', 'there already')),
  ('export', 'token.npz m.stablehlo --to stablehlo --platforms gpu',
   ('gpu', 'cuda', 'rocm')),
  ('push', 'token.npz mine --dry_run', ('OWNER/NAME',)),
  ('push', 'token.npz me/a/b --dry_run', ('OWNER/NAME',)),
  ('push', 'token.npz ../me/mine --dry_run', ('OWNER/NAME',)),
  ('push', f'{MIXER} new --format hf', ('hf', 'mixer')),
  ('push', f'{MIXER} mine', ('mine',)),
  ('prepare', 'imagenet21k --from no.tar --data_dir D', ('no.tar',)),
  ('prepare', 'imagenet21k --from text.tar --data_dir D', ('text.tar',)),
  ('prepare', 'imagenet21k --from zeros.tar --data_dir D', ('zeros.tar', 'WordNet')),
  ('prepare', 'imagenet21k --from photos --data_dir D', ('photos', 'WordNet')),
  ('prepare', 'imagnet --from photos --data_dir D', ("'imagnet'", 'imagenet21k')),
  ('prepare', 'images --from zeros.tar --name x --data_dir D', ('images',)),
  ('prepare', 'images --from photos --name x --data_dir D', ('photos', 'classes')),
  ('prepare', 'images --from classes --name My-Pets --data_dir D',
   ('My-Pets', 'my_pets')),
  ('prepare', 'images --from classes --name x --beam_pipeline_options a=b --data_dir D',
   ('--beam_pipeline_options', '--beam_runner')),
  # Pages and pictures.
  ('report', 'mine', ('mine/config.json is damaged',)),
  ('report', 'nowhere', ('no nowhere/config.json:', 'folder of a run')),
  ('report', 'photos photos', ('twice',)),
  ('report', 'gs://bucket/run --open', ('--open', '--out')),
  ('report', 'photos --out /no/such/page.html', ('/no/such',)),
  ('figures', 'rolout token.npz', ("'rolout'", 'rollout')),
  ('figures', 'rollout token.npz', ('IMAGE_OR_FOLDER',)),
  ('figures', 'rollout token.npz photos/a.png --head 1', ('--head', 'rollout --help')),
  ('figures', 'attention token.npz photos/a.png --layer 7', ('layer=7', 'pooling')),
  ('figures', 'gradient token.npz photos/a.png --class cat', ('--class', 'cat', 9)),
  ('figures', 'rollout mixer.npz photos/a.png', ('Mixer', 'gradient')),
  ('figures', 'distance bit.npz photos/a.png', ('BiT', 'attention', 'gradient')),
  ('figures', 'posemb bit.npz', ('BiT', 'filters')),
  ('figures', 'compute --format gif', ("'gif'", 'svg')),
  ('figures', 'compute --out taken', ('--out', 'file')),
  ('inspect', '', ('model', '--config')),
  ('inspect', 'vit:X/16', ("'X/16'", 'B/16')),
  ('inspect', 'vti:B/16', ("'vti'", 'vit')),
  ('inspect', 'vit:B/16 --resolution 12', ('12x12', '16x16')),
  ('inspect', 'vit:B/16 --set clasifier=map', ('clasifier', '"classifier"')),
  ('inspect', 'runs/nothing', ('runs/nothing', '--config')),
  ('inspect', 'configs/digits.py:debug', ('--config configs/digits.py:debug',)),
  ('inspect', 'vit:B/16 --zoo', ('vit:B/16', '--zoo')),
  ('inspect', 'vit:B/16 --config.seed=1', ('--config.seed=1',)),
  ('inspect', 'nowhere.npz', ("'nowhere.npz'", '--zoo')),
  ('inspect', '--config vit_b16:data=folder:/mine', ('folder:/mine', '--examples')),
  ('inspect', '--config vit_b16:debug --mesh data=3', ('batch_size', 3)),
  ('inspect', '--config vit_b16 --mesh date=3', ("'date'", 'data')),
  ('inspect', '--config vit_b16 --tpu v3:2x2 --mesh data=8',
   ('--mesh', '--config.mesh.')),
]  # fmt: skip


@pytest.fixture(scope='module')
def places(tmp_path_factory):
  """Returns a folder with all files and folders that the rows name."""
  folder = tmp_path_factory.mktemp('places')
  for name, golden in GOLDENS.items():
    (folder / name).symlink_to(GOLDEN / golden)
  with np.load(folder / 'token.npz') as file:
    body = {name: x for name, x in file.items() if not name.startswith('head/')}
  np.savez(folder / 'headless.npz', **body)
  pixels = np.zeros((10, 32, 32, 3), np.uint8)
  several = np.eye(10, dtype=bool) | (np.arange(10) == 0)
  np.savez(folder / 'labels.npz', test_images=pixels, test_labels=several)
  for name in ('photos', 'classes/a', 'broken', 'drawings', 'mine', 'words'):
    (folder / name).mkdir(parents=True)
  # A vocabulary of other weights.
  tokenizer = pairs.tokenizer_json({'a': 0, '</s>': 1, 'dog': 999})
  (folder / 'words/tokenizer.json').write_bytes(tokenizer)
  (folder / 'words/pair.npz').symlink_to(GOLDEN / 'siglip_bigvision.npz')
  Image.fromarray(pixels[0]).save(folder / 'photos/a.png')
  shutil.copy(folder / 'photos/a.png', folder / 'classes/a')
  (folder / 'drawings/x.svg').write_text('<svg/>')
  (folder / 'zeros.tar').write_bytes(bytes(10_240))
  (folder / 'names.txt').write_text('cat\ndog\n')
  for name in ('text.tar', 'text.parquet', 'photos/bad.png'):
    (folder / name).write_text('Words, nothing else. ' * 100)
  for name in ('taken', 'mine/config.json', *(f'broken/{i}.png' for i in range(3))):
    (folder / name).touch()
  pq.write_table(pa.table({'path': ['a']}), folder / 'plain.parquet')
  return folder


@pytest.mark.usefixtures('one_device')
@pytest.mark.parametrize(('command', 'arguments', 'words'), REFUSED)
def test_refused_in_one_line(command, arguments, words, places, capsys, monkeypatch):
  monkeypatch.chdir(places)

  def times():
    # `prepare` makes its folder D before it looks at the files, and the lock of `embed` stays.
    theirs = ('D', '.f.parquet.lock')
    paths = [path for path in places.rglob('*') if path.name not in theirs]
    return {path: path.is_file() and path.stat().st_mtime_ns for path in paths}

  before = times()
  name = COMMANDS[command][0]
  if importlib.util.find_spec(name).submodule_search_locations:
    name += '.__main__'
  main = importlib.import_module(name).main
  commands.assert_refused(main, capsys, shlex.split(arguments), words)
  assert times() == before
