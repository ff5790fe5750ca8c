"""Whole models with a text tower: each loads by its path and computes what its library does."""

import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, pairs
from tests.support.goldens import path_of
from vit_jax import trees
from vit_jax.models.text import TextTransformer
from vit_jax.weights import readers
from vit_jax.weights.families import text
from vit_jax.weights.image_text import ImageText

# Golden -> fields that no config tells.
GOLDENS = {
  'siglip_hf': {},
  'siglip2_naflex_hf': {},
  'siglip_bigvision': {},
  'clip_openai': dict(act='quick_gelu', num_heads=1),
  'pe_core_original': dict(act='gelu_erf', num_heads=2, map_heads=4),
}


@pytest.mark.parametrize('name', GOLDENS)
def test_text_towers_agree(name):
  path, expected = path_of(name), np.load(GOLDEN / f'{name}.expected.npz')
  raw = readers.read(path)
  beside, others = text.split(raw.arrays, raw.config, path)
  assert not any('text' in n or 'logit' in n or 'token_emb' in n for n in others)
  read = text.read(beside, GOLDENS[name])
  variables = trees.variables(read.flat)
  z, out = TextTransformer(**read.fields).apply(variables, expected['input_ids'])
  computed = {
    'text_features': z,
    'text_embeds': z / np.linalg.norm(z, axis=1, keepdims=True),
    'text_tokens': out['encoded'],
  }
  keys = computed.keys() & {*expected}
  assert keys & {'text_features', 'text_embeds'}
  for key in keys:
    atol = 5e-6 * max(1, np.abs(expected[key]).max())
    np.testing.assert_allclose(computed[key], expected[key], rtol=0, atol=atol)


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
  """SigLIP of big_vision, with letters for tokens."""
  loaded = vit_jax.load(pairs.siglip(tmp_path_factory.mktemp('pair') / 'siglip'))
  letters = lambda texts: np.array([[ord(c) % 60 for c in f'{t:10}'] for t in texts])
  loaded.__dict__['tokenizer'] = letters
  return loaded


def test_pairs_agree(pair):
  expected = np.load(GOLDEN / 'siglip_bigvision.expected.npz')
  image, ids = expected['image'], expected['input_ids']
  np.testing.assert_allclose(pair.image(image), expected['image_embeds'], atol=2e-6)
  np.testing.assert_allclose(pair.embed_ids(ids), expected['text_embeds'], atol=2e-6)
  variables = {'params': {'image': pair.params, **pair.beside}}
  logits, _ = pair.towers.apply(variables, image, ids)
  np.testing.assert_allclose(logits, expected['logits_per_image'], atol=1e-5)


def test_a_pair_has_texts_and_images_in_files(pair):
  pixels = np.random.default_rng(0).integers(0, 256, (2, 40, 50, 3), np.uint8)
  texts = ['a cat', 'a dog', 'snow']
  scale, bias = np.exp(pair.beside['logit_scale']), pair.beside['logit_bias']
  expected = scale * pair.image(pair.preprocess(pixels)) @ pair.text(texts).T + bias
  np.testing.assert_allclose(pair.logits(pixels, texts), expected, atol=1e-5)
  # However many there are in a step.
  one = np.concatenate([pair.text([text]) for text in texts])
  np.testing.assert_allclose(pair.text(texts), one, atol=2e-6)
  many = pair.text(texts * 90)
  np.testing.assert_allclose(many, np.tile(one, (90, 1)), atol=2e-6)


def test_a_zero_shot_classifier_is_an_ordinary_one(pair):
  labels, templates = ['a cat', 'a dog', 'snow'], ['{}', 'my {}']
  classifier = pair.classifier(labels, templates)
  assert not isinstance(classifier, ImageText)
  assert (classifier.class_names, classifier.model.num_classes) == (labels, 3)
  means = [pair.text([t.format(label) for t in templates]).mean(0) for label in labels]
  means = np.array([x / np.linalg.norm(x) for x in means])
  images = np.load(GOLDEN / 'siglip_bigvision.expected.npz')['image']
  logits, _ = classifier.model.apply(classifier.variables, images)
  scale, bias = np.exp(pair.beside['logit_scale']), pair.beside['logit_bias']
  expected = scale * pair.image(images) @ means.T + bias
  np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_another_model_on_the_image_tower_has_no_texts(pair):
  assert isinstance(vit_jax.load(pair.source, image_size=48), ImageText)
  for options in (dict(num_classes=3), dict(tune={'method': 'lora', 'rank': 2})):
    assert not isinstance(vit_jax.load(pair.source, **options), ImageText)


def test_a_text_tower_that_is_not_read_is_left_out(tmp_path, pair):
  with np.load(f'{pair.source}/w.npz') as file:
    arrays = dict(file) | {'params/txt/other/kernel': np.zeros((2, 2))}
  np.savez(tmp_path / 'w.npz', **arrays)
  loaded = vit_jax.load(tmp_path / 'w.npz')
  assert not isinstance(loaded, ImageText)
  assert 'other/kernel' in loaded.report
