"""ResNet beside timm and transformers: files both ways, a step of training, dilation."""

import functools

import jax
import numpy as np
import pytest

import vit_jax
from tests.support.peers import MARKS, agree, images, ours, randomise, save_timm, theirs
from vit_jax import trees, weights

pytestmark = MARKS

TOLERANCE = 1e-5  # rounding; relative where logits are larger


def trained(torch, model):
  """Makes every parameter random, and statistics those of a trained network."""
  for name, statistic in model.named_buffers():
    if name.endswith('running_mean'):
      statistic.add_(0.1 * torch.randn_like(statistic))
    if name.endswith('running_var'):
      statistic.mul_(0.5 + torch.rand_like(statistic))
  return randomise(torch, model, scale=0.02)


def small(timm, **options):
  options = dict(layers=(1, 1, 2, 1), channels=(8, 16, 24, 32), num_classes=7) | options
  return timm.models.ResNet(timm.models.resnet.Bottleneck, **options), options


def saved(torch, timm, folder, **options):
  model, options = small(timm, **options)
  return trained(torch, model), save_timm(folder, model, 'resnet50', **options)


def test_timm_resnet_by_name_both_ways(torch, timm, tmp_path):
  model = trained(torch, timm.create_model('resnet26', num_classes=10))
  folder = save_timm(tmp_path / 'timm', model, 'resnet26')
  x = images(96, batch=1)
  expected = theirs(torch, model, x)
  agree(ours(folder, x), expected, TOLERANCE)
  weights.write(weights.read(folder), tmp_path / 'back', 'timm')
  again = timm.create_model(f'local-dir:{tmp_path / "back"}', pretrained=True).eval()
  for key, tensor in model.state_dict().items():
    assert torch.equal(tensor, again.state_dict()[key]), key
  agree(theirs(torch, again, x), expected, TOLERANCE)


@pytest.mark.parametrize('stride', [8, 16])
def test_dilated_stages_are_those_of_timm(torch, timm, tmp_path, stride):
  model, folder = saved(torch, timm, tmp_path / 'timm', output_stride=stride)
  x = images(64)
  agree(ours(folder, x), theirs(torch, model, x), TOLERANCE)


def test_transformers_resnet_both_ways(torch, transformers, tmp_path):
  config = transformers.ResNetConfig(
    embedding_size=16, hidden_sizes=[32, 64, 64], depths=[1, 2, 1], num_labels=10
  )
  whole = transformers.ResNetForImageClassification
  model = trained(torch, whole(config))
  model.save_pretrained(tmp_path / 'hf')
  x = images(64)
  expected = theirs(torch, model, x)
  agree(ours(tmp_path / 'hf', x), expected, TOLERANCE)
  weights.write(weights.read(tmp_path / 'hf'), tmp_path / 'back', 'hf')
  again, info = whole.from_pretrained(tmp_path / 'back', output_loading_info=True)
  assert not any(info[k] for k in ('missing_keys', 'unexpected_keys'))
  agree(theirs(torch, again.eval(), x), expected, TOLERANCE)


def test_statistics_after_a_step_are_those_of_pytorch(torch, timm, tmp_path):
  model, folder = saved(torch, timm, tmp_path / 'timm')
  loaded, x = vit_jax.load(folder), images(64, batch=4)
  apply = functools.partial(loaded.model.apply, train=True, mutable=['batch_stats'])
  (logits, _), updated = jax.jit(apply)(loaded.variables, x)
  agree(np.asarray(logits), theirs(torch, model.train(), x), TOLERANCE)
  after = save_timm(tmp_path / 'after', model, 'resnet50', **small(timm)[1])
  expected = vit_jax.load(after).variables['batch_stats']
  found = trees.flatten(updated['batch_stats'])
  for name, value in trees.flatten(expected).items():
    agree(np.asarray(found[name]), value, TOLERANCE)
