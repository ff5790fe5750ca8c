"""Publishing: the folder, its card and licence, and the requests to the hub."""

import inspect
import json
import math
import re
import shutil
import sys

import huggingface_hub
import jax
import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, commands
from vit_jax import cli
from vit_jax.tools import push
from vit_jax.weights import steps, zoo

TOKEN = GOLDEN / 'vit_google_token.npz'


def run(*args):
  return cli.run(push.main, [str(a) for a in args])


def parsed(folder):
  """The card as huggingface_hub reads it."""
  return huggingface_hub.ModelCard.load(folder / 'README.md')


def logits(source, x):
  model, params = vit_jax.load(source)
  return jax.jit(model.apply)({'params': params}, x)[0]


@pytest.fixture
def trained(short_run, tmp_path):
  """A copy of a run's folder."""
  return shutil.copytree(short_run, tmp_path / 'run')


def change(run_folder, **sections):
  path = run_folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | sections))


@pytest.mark.parametrize(
  ('source', 'to', 'file'),
  [
    ('vit_google_token.npz', None, 'model.safetensors'),
    ('vit_google_token.npz', 'hf', 'model.safetensors'),
    ('vit_google_prelogits.npz', None, 'model.npz'),  # neither library has that layer
  ],
)
def test_the_folder_holds_the_same_model(tmp_path, source, to, file):
  option = ['--format', to] if to else []
  folder = tmp_path / 'a'
  args = [GOLDEN / source, 'me/mine', '--dry_run', '--out', folder, *option]
  assert run(*args) == 0
  assert (folder / file).is_file()
  x = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
  np.testing.assert_array_equal(logits(folder, x), logits(GOLDEN / source, x))
  page = parsed(folder)
  library = {'model.npz': 'vit_jax'}.get(file, {'hf': 'transformers'}.get(to, 'timm'))
  assert page.data.library_name == library
  assert page.data.pipeline_tag == 'image-classification'
  assert "vit_jax.load('hf:me/mine')" in page.text
  words = {'timm': 'hf-hub:me/mine', 'transformers': 'AutoImageProcessor'}
  assert words.get(library, '') in page.text


def test_the_card_of_a_run(trained, tmp_path, capsys):
  change(trained, weights={'source': '/home/me/secret/ViT-B_16.npz'})
  out = tmp_path / 'out'
  assert run(trained, 'me/mine', '--dry_run', '--out', out, '--json') == 0
  record = json.loads(capsys.readouterr().out)
  assert record['to'] == 'google'  # its images have one channel
  assert record['license'] == 'apache-2.0'
  page = parsed(out)
  assert page.data.license == 'apache-2.0'
  assert f'step {record["step"]}' in page.text
  assert 'ViT-B_16.npz' in page.text
  config = json.loads((out / 'training_config.json').read_text())
  assert config['optim'] == json.loads((trained / 'config.json').read_text())['optim']
  for path in out.iterdir():
    assert b'secret' not in path.read_bytes()
  vit_jax.load(out)


def test_the_card_shows_results_alone(trained, tmp_path, monkeypatch):
  results = {'test/top1': 0.5, 'test/loss': 0.25}
  others = {'test/examples': 360, 'test/top5': math.nan}
  others |= {'time/seconds_left': 7.0, 'train/lr': 0.1, 'train/loss': 0.3}
  saved = property(lambda run: dict.fromkeys(run.steps, results | others))
  monkeypatch.setattr(steps.Steps, 'metrics', saved)
  out = tmp_path / 'out'
  assert run(trained, 'me/mine', '--dry_run', '--out', out) == 0
  rows = re.findall(r'^\| (\w+/\w+) \| (.*) \|', parsed(out).text, re.MULTILINE)
  assert rows == [('test/loss', '0.25'), ('test/top1', '50.00%')]


def test_results_are_in_the_metadata():
  from huggingface_hub import ModelCard

  page = ModelCard(
    push.card(
      {
        **{'repo': 'me/mine', 'format': 'timm', 'library': 'timm', 'family': 'vit'},
        **{'variant': 'S/16', 'params': 22_000_000, 'size': (224, 224), 'pp': 'decode'},
        **{'classes': 10, 'class_names': ['<b>cat</b>', '[x](y)', 'a\n# b']},
        **{'license': 'mit', 'stated': True, 'origin': None, 'config': {}, 'step': 500},
        'base': 'google/vit-base-patch16-224-in21k',
        'dataset': push._dataset({'data': {'source': 'tfds:cifar10'}}),
        'results': {'test/loss': (0.1, '0.1'), 'test/top1': (0.9806, '98.06%')},
      }
    )
  )
  assert page.data.datasets == ['cifar10']
  assert page.data.base_model == 'google/vit-base-patch16-224-in21k'
  (result,) = page.data.eval_results
  assert (result.dataset_name, result.metric_type) == ('cifar10', 'accuracy')
  assert result.metric_value == 0.9806
  assert '| test/top1 | 98.06% |' in page.text
  assert r'\<b\>cat\</b\>, \[x\]\(y\), a\\n\# b.' in page.text


@pytest.mark.parametrize(
  ('weights', 'args', 'name', 'says'),
  [
    (None, [], 'unknown', 'Not stated yet'),
    ({'source': 'b16-augreg-i21k'}, [], 'apache-2.0', 'b16-augreg-i21k'),
    ({'source': 'gone/theirs.npz'}, [], 'unknown', 'Ask their publisher'),
    ({'source': 'gone/theirs.npz'}, ['--license', 'mit'], 'mit', 'mit'),
  ],
)
def test_the_licence_is_that_of_the_weights(
  trained, tmp_path, capsys, weights, args, name, says
):
  change(trained, **({'weights': weights} if weights else {}))
  out = tmp_path / 'out'
  assert run(trained, 'me/mine', '--dry_run', '--out', out, *args) == 0
  assert parsed(out).data.license == name
  assert says in parsed(out).text
  assert ('--license' in capsys.readouterr().out) == (name == 'unknown')


def test_the_licence_goes_from_run_to_run(trained, tmp_path):
  change(trained, weights={'source': 'b16-i21k'})
  shutil.copytree(trained, tmp_path / 'second')
  change(tmp_path / 'second', weights={'source': str(trained)})
  assert zoo.find_licence(tmp_path / 'second') == ('apache-2.0', 'b16-i21k')


class FakeApi:
  """Records the requests to the hub; the repository has a card already if `card`."""

  def __init__(self, card=False, error=None):
    self.requests, self._card, self._error = [], card, error

  def create_repo(self, repo, *, private, exist_ok):
    if self._error:
      raise self._error
    self.requests.append(('create', repo, private, exist_ok))

  def file_exists(self, repo, name):
    return self._card

  def upload_folder(self, *, repo_id, folder_path, commit_message, ignore_patterns):
    files = {p.name for p in folder_path.iterdir()} - set(ignore_patterns or ())
    self.requests.append(('upload', repo_id, files, commit_message))


FILES = {'model.safetensors', 'config.json', 'README.md'}


@pytest.mark.parametrize(
  ('there', 'files'),
  [
    (False, FILES),
    (True, FILES - {'README.md'}),  # somebody may have written in it
  ],
)
def test_upload(monkeypatch, capsys, there, files):
  api = FakeApi(card=there)
  monkeypatch.setattr(push, 'client', lambda: api)
  assert run(TOKEN, 'me/mine', '--private') == 0
  message = f'{TOKEN}, by vit_jax'
  assert api.requests == [
    ('create', 'me/mine', True, True),
    ('upload', 'me/mine', files, message),
  ]
  out = capsys.readouterr().out
  assert 'https://huggingface.co/me/mine' in out
  assert ('README.md stays' in out) == there


def test_the_fake_has_the_hubs_own_arguments():
  from huggingface_hub import HfApi

  for name in ('create_repo', 'file_exists', 'upload_folder'):
    real = inspect.signature(getattr(HfApi, name)).parameters
    used = inspect.signature(getattr(FakeApi, name)).parameters
    keywords = {p.name for p in used.values() if p.kind is p.KEYWORD_ONLY}
    assert keywords <= set(real), name


def test_an_error_of_the_hub_is_one_line(tmp_path, monkeypatch, capsys):
  error = RuntimeError('401 Client Error.\n\nInvalid username or password.')
  monkeypatch.setattr(push, 'client', lambda: FakeApi(error=error))
  argv = (TOKEN, 'me/mine', '--out', tmp_path / 'a')
  commands.assert_refused(push.main, capsys, argv, ('401', 'HF_TOKEN', '--dry_run'))


def test_without_huggingface_hub_the_error_names_the_extra(
  tmp_path, monkeypatch, capsys
):
  out = tmp_path / 'a'
  monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
  argv = (TOKEN, 'me/mine', '--out', out)
  facts = ('vit_jax[hub]', '--dry_run')
  commands.assert_refused(push.main, capsys, argv, facts)
  assert not out.exists()


@pytest.mark.parametrize(
  ('text', 'shown'),
  [
    ('folder:/home/me/photos', 'folder:photos'),
    ('../a/b.npz', 'b.npz'),
    ('gs://bucket/a/b.npz', 'gs://bucket/a/b.npz'),
    ('tfds:cifar10', 'tfds:cifar10'),
    ('decode|resize(32)', 'decode|resize(32)'),
  ],
)
def test_folders_of_this_machine_are_not_published(text, shown):
  assert push.public({'a': [text]}) == {'a': [shown]}
