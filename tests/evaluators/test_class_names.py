"""Names of ImageNet's classes, and the weights that get them."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import vit_jax
from tests.support import GOLDEN, naming
from vit_jax import cli, imagenet, weights
from vit_jax.errors import UserError
from vit_jax.evaluators import class_match
from vit_jax.tools import convert, predict
from vit_jax.weights import zoo


def test_the_lists_are_the_published_ones():
  for name, row in imagenet.LISTS.items():
    ids = imagenet.wordnet_ids(name)
    assert len(ids) == len(set(ids)) == len(imagenet.class_names(name)) == row.number
    if row.test_set:
      assert {*ids} < {*imagenet.wordnet_ids('imagenet1k')}
    assert ids == sorted(ids)
  # Indices that ImageNet-1k models are known by, the last and two in between.
  names = vit_jax.class_names('imagenet1k')
  assert names[0] == 'tench, Tinca tinca'
  assert names[207] == 'golden retriever'
  assert names[281] == 'tabby, tabby cat'
  assert names[999].startswith('toilet tissue')
  # The two ids that Google's list has and the release of autumn 2011 has not
  # (github.com/google-research/big_transfer, issue 18).
  google, autumn = (set(imagenet.wordnet_ids(f'imagenet{x}k')) for x in (21, 22))
  assert google - autumn == {'n03931044', 'n09859684'}
  assert autumn < google
  with pytest.raises(UserError, match=naming('imagenet2k', 'imagenet21k')):
    imagenet.class_names('imagenet2k')


def google_file(path, classes):
  """Writes a published file with another head, which always predicts class 7."""
  path.parent.mkdir(parents=True, exist_ok=True)
  bias = np.float32(np.arange(classes) == 7)
  with np.load(GOLDEN / 'vit_google_token.npz') as file:
    arrays = dict(file)
  kernel = np.zeros((len(arrays['head/kernel']), classes), np.float32)
  np.savez(path, **arrays | {'head/kernel': kernel, 'head/bias': bias})
  return str(path)


@pytest.mark.parametrize(
  ('entry', 'classes', 'name'),
  [
    ('b16-i21k-i1k-224', 1000, 'imagenet1k'),
    ('b16-augreg-i21k', 21843, 'imagenet21k'),
    ('b16-i21k-i1k-224', 10, None),  # not what the zoo says: a fake
    # Published with a head of zeros.
    ('b16-i21k', 21843, None),
  ],
)
def test_names_of_the_zoo(tmp_path, monkeypatch, entry, classes, name):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  url = zoo.ENTRIES[entry].url.removeprefix('gs://')
  google_file(tmp_path / 'storage.googleapis.com' / url, classes)
  assert weights.read(entry).class_names == (name and imagenet.class_names(name))
  assert zoo.find_licence(entry).name == 'apache-2.0'


def test_a_file_with_the_name_that_google_gave_it(tmp_path):
  published = google_file(tmp_path / 'ViT-B_16.npz', 1000)
  assert weights.read(published).class_names == imagenet.class_names('imagenet1k')
  # One's own model with as many classes has names only if its data gave them.
  own = weights.read(google_file(tmp_path / 'mine.npz', 1000))
  assert own.class_names is None
  assert zoo.find_licence(own.source) == (None, own.source)
  dest = tmp_path / 'b' / 'ViT-B_16.npz'
  dest.parent.mkdir()
  run = weights.read(tmp_path / 'mine.npz', act='gelu_erf')
  weights.write(run, dest, 'google')
  assert weights.read(dest).class_names is None


def timm_folder(folder, classes, **config):
  shutil.copytree(GOLDEN / 'vit_timm', folder)
  arrays = load_file(folder / 'model.safetensors')
  arrays['head.weight'] = np.zeros((classes, 48), np.float32)
  arrays['head.bias'] = np.zeros(classes, np.float32)
  save_file(arrays, folder / 'model.safetensors')
  own = json.loads((folder / 'config.json').read_text())
  own['num_classes'] = classes
  own['pretrained_cfg'] |= config
  (folder / 'config.json').write_text(json.dumps(own))
  return folder


@pytest.mark.parametrize(
  ('tag', 'classes', 'name'),
  [
    ('augreg2_in21k_ft_in1k', 1000, 'imagenet1k'),
    ('augreg_in21k', 21843, 'imagenet21k'),
    ('sw_in12k', 11821, 'imagenet12k'),
    ('augreg_in21k', 1000, None),
    (None, 1000, None),
  ],
)
def test_names_by_the_tag_of_timm(tmp_path, tag, classes, name):
  folder = timm_folder(tmp_path / 'a', classes, tag=tag, license='mit')
  assert weights.read(folder).class_names == (name and imagenet.class_names(name))
  assert zoo.find_licence(folder).name == 'mit'


def test_names_in_the_file_come_first(tmp_path):
  names = [f'my {i}' for i in range(1000)]
  folder = timm_folder(tmp_path / 'a', 1000, tag='x_in1k', label_names=names)
  assert weights.read(folder).class_names == names


def test_the_licence_of_a_card(tmp_path):
  shutil.copytree(GOLDEN / 'vit_hf', tmp_path / 'a')
  for line, name in {
    'license: "mit"': 'mit',
    'license: unknown': None,
    'licence of the data: mit': None,
  }.items():
    (tmp_path / 'a/README.md').write_text(f'---\ntags:\n- x\n{line}\n---\nlicense: x')
    assert zoo.find_licence(tmp_path / 'a').name == name


def run(tool, *args):
  return cli.run(tool.main, [str(a) for a in args])


def test_predict_and_convert_show_names(tmp_path, capsys):
  source = google_file(tmp_path / 'Mixer-B_16.npz', 21843)
  image = tmp_path / 'a.png'
  Image.new('RGB', (40, 40)).save(image)
  assert run(predict, source, image, '--top', '1') == 0
  name = imagenet.class_names('imagenet21k')[7]
  assert name in capsys.readouterr().out
  # To timm as a list, to Google's format by the list's name: its comment is short.
  assert run(convert, source, tmp_path / 't', '--to', 'timm') == 0
  assert json.loads((tmp_path / 't/config.json').read_text())['label_names'][7] == name
  assert run(convert, tmp_path / 't', tmp_path / 'g.npz') == 0
  assert weights.read(tmp_path / 'g.npz').class_names[7] == name


def test_predict_explains_wordnet_ids(tmp_path, capsys):
  ids = imagenet.wordnet_ids('imagenet1k')
  folder = timm_folder(tmp_path / 'a', 1000, label_names=ids)
  Image.new('RGB', (40, 40)).save(tmp_path / 'a.png')
  assert run(predict, folder, tmp_path / 'a.png', '--top', '1', '--json') == 0
  (top,) = json.loads(capsys.readouterr().out)['images'][0]['top']
  assert top['name'] == ids[top['class']]
  assert top['description'] == imagenet.describe(top['name'])


def test_names_and_wordnet_ids_are_the_same_classes():
  ids, names = imagenet.wordnet_ids('imagenet1k'), imagenet.class_names('imagenet1k')
  assert class_match.ids(ids) == class_match.ids(names) == ids
  # Others name a few of them otherwise.
  others = ['construction crane' if name == 'crane' else name for name in names]
  assert class_match.ids(others) == ids
  assert class_match.ids(names[::-1]) == names[::-1]
