"""timm's architectures and options by the fields of a ViT."""

import re

import numpy as np
import pytest

from tests.support.goldens import path_of
from vit_jax import models, weights
from vit_jax.models import timm
from vit_jax.weights import timm_options


def options_of(**fields):
  return timm_options.find(models.build('vit', **fields).fields())


def test_every_name_has_its_own_options():
  for name in timm.architectures():
    if name.startswith('test_'):  # chosen last, because they are timm's own tests
      continue
    fields = models.build(name).fields()
    model = timm_options.find(fields)
    assert not model.args, (name, model)
    again = models.build(model.name).fields()
    untold = ('layer_scale', 'num_classes')  # the arrays are what tells them
    assert again | {key: fields[key] for key in untold} == fields


@pytest.mark.parametrize(
  ('fields', 'name', 'args'),
  [
    (dict(variant='B/16', act='gelu_erf'), 'vit_base_patch16_224', {}),
    (dict(variant='S/8'), 'vit_small_patch8_224', {'act_layer': 'gelu_tanh'}),
    (
      dict(variant='Ti/16', act='gelu_erf', classifier='gap', final_norm='pooled')
      | dict(relpos='layer', posemb='none', qkv_bias='qv', cls_token=True),
      'beit_base_patch16_224',
      dict(embed_dim=192, num_heads=3, init_values=0.0),
    ),
    (
      dict(variant='Ti/16', act='gelu_erf', rope='dinov3', norm_eps=1e-5)
      | dict(posemb='none', registers=4, qkv_bias='qv', layer_scale=1.0),
      'vit_tiny_patch16_dinov3_qkvb',
      {'global_pool': 'token'},
    ),
  ],
)
def test_options_over_the_nearest_name(fields, name, args):
  model = options_of(**fields)
  assert (model.name, model.args) == (name, args)


@pytest.mark.parametrize(
  'change',
  [
    dict(classifier='token_mean'),
    dict(posemb='rotary'),
    dict(rope='dinov3', rope_base=50.0),
    dict(head_bias=False),
    dict(norm_eps=2e-5),
    dict(block='parallel', rope='dinov3'),
  ],
)
def test_fields_that_timm_lacks_are_named(change):
  words = [f'{key}={value!r}' for key, value in change.items()]
  with pytest.raises(ValueError, match='|'.join(map(re.escape, words))):
    options_of(variant='Ti/16', **change)


def test_the_position_of_a_class_token_beside_registers_goes_into_it(tmp_path):
  source = weights.read(path_of('dinov2_reg4_swiglu_original'), num_heads=2)
  assert source.fields['posemb_tokens'] == 'cls'
  weights.write(source, tmp_path / 'out', 'timm')
  again = weights.read(tmp_path / 'out')
  assert again.fields['posemb_tokens'] == 'patches'
  table = 'Transformer/posembed_input/pos_embedding'
  expected = source.flat['cls'] + source.flat[table][:, :1]
  np.testing.assert_array_equal(again.flat['cls'], expected)
  np.testing.assert_array_equal(again.flat[table], source.flat[table][:, 1:])
