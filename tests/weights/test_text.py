"""Whole models with a text tower: each loads by its path and computes what its library does."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, naming
from tests.support.goldens import PAIRS, TOLD, compare_vit, path_of, vit_outputs
from vit_jax.errors import UserError
from vit_jax.text.tokenizer import Rules, Tokenizer
from vit_jax.weights.image_text import ImageText

load = functools.cache(lambda name: vit_jax.load(path_of(name), **TOLD.get(name, {})))


def unit(features):
  return features / np.linalg.norm(features, axis=1, keepdims=True)


@pytest.mark.parametrize('name', PAIRS)
def test_whole_models_agree(name):
  expected = dict(np.load(GOLDEN / f'{name}.expected.npz'))
  for kind in ('image', 'text'):
    if (features := expected.get(f'{kind}_features')) is not None:
      expected[f'{kind}_embeds'] = unit(features)
  loaded = load(name)
  if 'image_2' in expected:  # the size of the file's own grid; test_vit_hf.py has three
    expected['image'] = expected['image_2'][None]
    del expected['image_tokens']  # which are padded
    for key in ('image_embeds', 'image_pooled', 'logits_per_image'):
      expected[key] = expected[key][2:]
  computed = vit_outputs(loaded, expected['image'], name)
  compared = computed.keys() & expected.keys()
  compare_vit(computed, {key: expected[key] for key in compared})
  image = computed['image_embeds']
  np.testing.assert_allclose(image, expected['image_embeds'], atol=1e-6)
  tower, variables = loaded.towers.text, {'params': loaded.beside['text']}
  features, out = jax.jit(tower.apply)(variables, expected['input_ids'])
  text = unit(features)
  np.testing.assert_allclose(text, expected['text_embeds'], atol=1e-6)
  if 'text_tokens' in expected:
    np.testing.assert_allclose(out['encoded'], expected['text_tokens'], atol=1e-5)
  variables = {'params': {'image': loaded.params, **loaded.beside}}
  logits = loaded.towers.apply(variables, image, text, method='logits')
  np.testing.assert_allclose(logits, expected['logits_per_image'], rtol=0, atol=1e-5)
  assert 'unused' not in loaded.report


def test_clip_of_the_first_configs(tmp_path):
  # Both sections had a second one that wins.
  folder = shutil.copytree(GOLDEN / 'clip_hf', tmp_path / 'clip')
  config = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  config['text_config_dict'] = config['text_config'] | {'hidden_act': 'gelu'}
  del config['text_config']
  (folder / 'config.json').write_text(json.dumps(config), encoding='utf-8')
  expected = load('clip_hf').towers.text.clone(act='gelu_erf')
  assert vit_jax.load(folder).towers.text == expected


def with_letters(loaded):
  """Gives a model a tokenizer of letters, the last of them an end."""
  N, vocab = loaded.rules.length, loaded.towers.text.vocab
  ids = lambda text: [ord(c) % (vocab - 1) for c in f'{text:{N}}'[: N - 1]]
  tokens = lambda texts: np.array([[*ids(text), vocab - 1] for text in texts])
  loaded.__dict__['tokenizer'] = tokens
  return loaded


# Every call has three images and four texts, so that each tower compiles once. Only the
# texts of two steps compile it again.
@pytest.fixture(scope='module', params=['clip_hf', 'siglip_bigvision'])
def pair(request):
  return with_letters(load(request.param))


def test_a_pair_embeds_images_and_ids(pair):
  expected = np.load(GOLDEN / f'{Path(pair.source).stem}.expected.npz')
  close = functools.partial(np.testing.assert_allclose, atol=1e-6)
  close(pair.image(expected['image']), expected['image_embeds'])
  close(pair.embed_ids(expected['input_ids']), expected['text_embeds'])


def test_a_pair_has_texts_and_images_in_files(pair):
  pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 50, 3), np.uint8)
  texts = ['a cat', 'a dog', 'snow', 'rain']
  scale, bias = np.exp(pair.beside['logit_scale']), pair.beside.get('logit_bias', 0)
  expected = scale * pair.image(pair.preprocess(pixels)) @ pair.text(texts).T + bias
  np.testing.assert_allclose(pair.logits(pixels, texts), expected, atol=1e-5)
  # However many there are in a step.
  expected = np.tile(pair.text(texts), (65, 1))
  np.testing.assert_allclose(pair.text(texts * 65), expected, atol=2e-6)


def test_a_zero_shot_classifier_is_an_ordinary_one(pair):
  labels, templates = ['a cat', 'snow'], ['{}', 'my {}']
  classifier = pair.classifier(labels, templates)
  assert not isinstance(classifier, ImageText)
  assert (classifier.class_names, classifier.model.num_classes) == (labels, 2)
  vectors = pair.text(['a cat', 'my a cat', 'snow', 'my snow'])
  means = unit(vectors.reshape(2, 2, -1).mean(1))
  images = np.random.default_rng(0).normal(size=(3, 32, 32, 3)).astype(np.float32)
  logits, _ = jax.jit(classifier.model.apply)(classifier.variables, images)
  scale, bias = np.exp(pair.beside['logit_scale']), pair.beside.get('logit_bias', 0)
  expected = scale * pair.image(images) @ means.T + bias
  np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_a_zero_shot_classifier_on_a_resnet():
  pair = with_letters(load('clip_resnet_open_clip'))
  labels = ['a cat', 'a dog', 'snow', 'rain']
  classifier = pair.classifier(labels)
  images = np.load(GOLDEN / 'clip_resnet_open_clip.expected.npz')['image']
  images = images.astype(np.float32)
  logits, _ = jax.jit(classifier.model.apply)(classifier.variables, images)
  np.testing.assert_allclose(logits, pair.logits(images, labels), atol=1e-5)


def test_another_model_on_the_image_tower_has_no_texts():
  path = path_of('siglip_bigvision')
  assert isinstance(vit_jax.load(path, image_size=48), ImageText)
  for options in (dict(num_classes=3), dict(tune={'method': 'lora', 'rank': 2})):
    assert not isinstance(vit_jax.load(path, **options), ImageText)


def test_a_text_tower_that_is_not_read_is_left_out(tmp_path):
  with np.load(path_of('siglip_bigvision')) as file:
    arrays = dict(file) | {'params/txt/other/kernel': np.zeros((2, 2))}
  np.savez(tmp_path / 'w.npz', **arrays)
  loaded = vit_jax.load(tmp_path / 'w.npz')
  assert not isinstance(loaded, ImageText)
  assert 'other/kernel' in loaded.report


@pytest.mark.parametrize(
  'change',
  [
    {'norm_kwargs': {'eps': np.nan}},
    {'pool_type': 'eos', 'eos_id': 'x'},
    {'tokenizer_kwargs': {'clean': 'no such'}},
  ],
)
def test_a_text_tower_that_cannot_be_computed_is_left_out(change, tmp_path):
  folder = shutil.copytree(GOLDEN / 'clip_open_clip', tmp_path / 'clip')
  path = folder / 'open_clip_config.json'
  config = json.loads(path.read_text(encoding='utf-8'))
  config['model_cfg']['text_cfg'] |= change
  path.write_text(json.dumps(config), encoding='utf-8')
  loaded = vit_jax.load(folder)
  assert not isinstance(loaded, ImageText)
  assert 'no texts' in loaded.report


def test_ids_beyond_the_table_name_the_vocabulary(pair, tmp_path):
  vocab = pair.towers.text.vocab
  with pytest.raises(ValueError, match=f'{vocab} is not one of the {vocab}'):
    pair.embed_ids(np.array([[0, vocab]]))
  path = tmp_path / 'tokenizer.json'
  tokens = Tokenizer(path, lambda text: [vocab + 7], 1, vocab, Rules(4, 'none', None))
  other = dataclasses.replace(pair)
  other.__dict__['tokenizer'] = tokens
  for embed in (other.text, other.classifier):
    with pytest.raises(UserError, match=naming(str(path), vocab + 7)):
      embed(['a cat'])
