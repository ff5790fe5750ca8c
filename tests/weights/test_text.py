"""Whole models with a text tower: each loads by its path and computes what its library does."""

import numpy as np
import pytest

from tests.support import GOLDEN
from tests.support.goldens import path_of
from vit_jax import trees
from vit_jax.models.text import TextTransformer
from vit_jax.weights import readers
from vit_jax.weights.families import text

# Activations of image towers that text towers share, where no config tells.
GOLDENS = {
  'siglip_hf': None,
  'siglip2_naflex_hf': None,
  'siglip_bigvision': None,
  'pe_core_original': 'gelu_erf',
}


def tower(name, act=None):
  path = path_of(name)
  raw = readers.read(path)
  beside, others = text.split(raw.arrays, raw.config, path)
  assert not any('text' in n or 'logit' in n or 'token_emb' in n for n in others)
  return text.read(beside, {'act': act})


@pytest.mark.parametrize('name', GOLDENS)
def test_text_towers_agree(name):
  read, expected = tower(name, GOLDENS[name]), np.load(GOLDEN / f'{name}.expected.npz')
  model, variables = TextTransformer(**read.fields), trees.variables(read.flat)
  z, out = model.apply(variables, expected['input_ids'])
  computed = {
    'text_features': z,
    'text_embeds': z / np.linalg.norm(z, axis=1, keepdims=True),
    'text_tokens': out['encoded'],
  }
  assert not ('text_features' in expected and 'text_embeds' in expected)
  for key in computed.keys() & {*expected}:
    atol = 5e-6 * max(1, np.abs(expected[key]).max())
    np.testing.assert_allclose(computed[key], expected[key], rtol=0, atol=atol)
