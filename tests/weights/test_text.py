"""Whole models with a text tower: each loads by its path and computes what its library does."""

import json
import shutil

import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN
from tests.support.goldens import path_of
from vit_jax.weights.image_text import ImageText

# Golden -> fields that neither arrays nor config tell.
GOLDENS = {
  'clip_hf': {},
  'clip_old_eos_hf': {},
  'siglip_hf': {},
  'siglip2_naflex_hf': dict(image_size=40),
  'siglip_bigvision': {},
  'clip_open_clip': {},
  'siglip_open_clip': dict(num_heads=2),
  'clip_openai': dict(act='quick_gelu', num_heads=1),
  'pe_core_original': dict(num_heads=2, map_heads=4),
}


@pytest.mark.parametrize('name', GOLDENS)
def test_whole_models_agree(name):
  expected = dict(np.load(GOLDEN / f'{name}.expected.npz'))
  loaded = vit_jax.load(path_of(name), **GOLDENS[name])
  for kind in ('image', 'text'):
    if (features := expected.get(f'{kind}_features')) is not None:
      lengths = np.linalg.norm(features, axis=1, keepdims=True)
      expected[f'{kind}_embeds'] = features / lengths
  images, rows = expected.get('image'), slice(None)
  if images is None:  # three sizes: take the one of the file's own grid
    images, rows = expected['image_2'][None], slice(2, 3)
  image, text = loaded.image(images), loaded.embed_ids(expected['input_ids'])
  np.testing.assert_allclose(image, expected['image_embeds'][rows], atol=1e-6)
  np.testing.assert_allclose(text, expected['text_embeds'], atol=1e-6)
  variables = {'params': {'image': loaded.params, **loaded.beside}}
  logits = loaded.towers.apply(variables, image, text, method='logits')
  logit = expected['logits_per_image'][rows]
  np.testing.assert_allclose(logits, logit, rtol=0, atol=1e-5)
  assert 'unused' not in loaded.report
  if 'text_tokens' in expected:
    variables = {'params': loaded.beside['text']}
    _, out = loaded.towers.text.apply(variables, expected['input_ids'])
    np.testing.assert_allclose(out['encoded'], expected['text_tokens'], atol=1e-5)


def test_clip_of_the_first_configs(tmp_path):
  # Both sections had a second one that wins.
  folder = shutil.copytree(GOLDEN / 'clip_hf', tmp_path / 'clip')
  config = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  config['text_config_dict'] = config['text_config'] | {'hidden_act': 'gelu'}
  del config['text_config']
  (folder / 'config.json').write_text(json.dumps(config), encoding='utf-8')
  expected = vit_jax.load(GOLDEN / 'clip_hf').towers.text.clone(act='gelu_erf')
  assert vit_jax.load(folder).towers.text == expected


def with_letters(loaded):
  """Gives a model a tokenizer of letters, the last of them an end."""
  N, vocab = loaded.rules.length, loaded.towers.text.vocab
  ids = lambda text: [ord(c) % (vocab - 1) for c in f'{text:{N}}'[: N - 1]]
  tokens = lambda texts: np.array([[*ids(text), vocab - 1] for text in texts])
  loaded.__dict__['tokenizer'] = tokens
  return loaded


@pytest.fixture(scope='module', params=['clip_hf', 'siglip_bigvision'])
def pair(request):
  return with_letters(vit_jax.load(path_of(request.param)))


def test_a_pair_has_texts_and_images_in_files(pair):
  pixels = np.random.default_rng(0).integers(0, 256, (2, 40, 50, 3), np.uint8)
  texts = ['a cat', 'a dog', 'snow']
  scale, bias = np.exp(pair.beside['logit_scale']), pair.beside.get('logit_bias', 0)
  expected = scale * pair.image(pair.preprocess(pixels)) @ pair.text(texts).T + bias
  np.testing.assert_allclose(pair.logits(pixels, texts), expected, atol=1e-5)
  # However many there are in a step.
  one = np.concatenate([pair.text([text]) for text in texts])
  np.testing.assert_allclose(pair.text(texts * 90), np.tile(one, (90, 1)), atol=2e-6)


def test_a_zero_shot_classifier_is_an_ordinary_one(pair):
  labels, templates = ['a cat', 'a dog', 'snow'], ['{}', 'my {}']
  classifier = pair.classifier(labels, templates)
  assert not isinstance(classifier, ImageText)
  assert (classifier.class_names, classifier.model.num_classes) == (labels, 3)
  means = [pair.text([t.format(label) for t in templates]).mean(0) for label in labels]
  means = np.array([x / np.linalg.norm(x) for x in means])
  images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
  logits, _ = classifier.model.apply(classifier.variables, images)
  scale, bias = np.exp(pair.beside['logit_scale']), pair.beside.get('logit_bias', 0)
  expected = scale * pair.image(images) @ means.T + bias
  np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize('i', range(3))
def test_naflex_at_the_size_of_each_image(i):
  expected = np.load(GOLDEN / 'siglip2_naflex_hf.expected.npz')
  image = expected[f'image_{i}']
  options = dict(image_size=image.shape[:2], resize='bilinear_antialias')
  loaded = vit_jax.load(path_of('siglip2_naflex_hf'), **options)
  embed = expected['image_embeds'][i : i + 1]
  np.testing.assert_allclose(loaded.image(image[None]), embed, atol=1e-6)


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
