"""Operations and parameters that papers and timm print for their models."""

import pytest

from vit_jax import models, trees, tune
from vit_jax.tools.inspect.model import Cost, cost
from vit_jax.train import flops

JFT = 303e6  # images


def forward(model: str, size: int = 224) -> Cost:
  name, variant, fields = models.parse_name(model)
  section = {'name': name, 'variant': variant, **fields, 'num_classes': 1000}
  return cost(section, (size, size, 3))


# Table 6 of the ViT paper, exaFLOPs of pre-training. Its ResNets are 3 to 4 % below ours:
# products of convolutions with their zero padding are not counted there.
@pytest.mark.parametrize(
  ('model', 'epochs', 'exaflops', 'tolerance'),
  [
    ('vit:B/16', 7, 224, 0.03),
    ('vit:L/32', 7, 196, 0.03),
    ('vit:H/14', 14, 4262, 0.03),
    ('bit:R50x1', 7, 50, 0.05),
    ('vit:R50+B/16', 7, 274, 0.03),
  ],
)
def test_compute_of_the_vit_paper(model, epochs, exaflops, tolerance):
  ours = flops.exa_training(forward(model).operations, epochs * JFT)
  assert ours == pytest.approx(exaflops, rel=tolerance)


# timm's parameters for 1000 classes and its multiply-adds in 1e9, or those of the Swin paper,
# Table 1 (b), which has one decimal.
@pytest.mark.parametrize(
  ('model', 'size', 'parameters', 'billions', 'tolerance'),
  [
    ('vit:B/16', 384, 86_859_496, 55.4, 5e-3),
    ('swin:B', 224, 87_768_224, 15.4, 5e-3),
    ('convnext:T', 224, 28_589_128, 4.456, 1e-3),
    ('convnext:B', 224, 88_591_464, 15.355, 1e-3),
    ('mvitv2_tiny', 224, 24_173_320, 4.677, 1e-3),
    ('mvitv2_small_cls', 224, 34_870_312, 6.999, 1e-3),
    ('resnet:50', 224, 25_557_032, 4.089, 1e-3),
    ('resnet:101', 224, 44_549_160, 7.801, 1e-3),
    ('swin:T', 224, 28_288_354, 4.491, 1e-3),
    ('swin:V2-T/16', 256, 28_347_154, 6.661, 1e-3),
  ],
)
def test_parameters_and_operations(model, size, parameters, billions, tolerance):
  ours = forward(model, size)
  assert ours.parameters == parameters
  assert ours.operations / 2e9 == pytest.approx(billions, rel=tolerance)


# Table 1 of the VPT paper (arXiv 2203.12119): parameters of all 24 tasks, which have 2,113
# classes, divided by those of one backbone.
@pytest.mark.parametrize(
  ('section', 'tuned', 'ratio'),
  [
    ({'method': 'full'}, 85_798_656, '24.02'),
    ({'method': 'linear'}, 0, '1.02'),
    ({'method': 'partial', 'blocks': 1}, 7_089_408, '3.00'),
    ({'method': 'mlp', 'layers': 3}, 1_184_256, '1.35'),
    ({'method': 'bias'}, 102_912, '1.05'),
    ({'method': 'lora', 'rank': 4}, 12 * 2 * 4 * (768 + 768), None),
    ({'method': 'vpt', 'number': 50, 'deep': False}, 50 * 768, None),
    ({'method': 'vpt', 'number': 50, 'deep': True}, 12 * 50 * 768, None),
  ],
)
def test_parameters_of_the_vpt_paper(section, tuned, ratio):
  model, shape = models.build('vit:B/16', num_classes=1), (224, 224, 3)
  attached, rules = tune.attach(model, model.family, shape, **section)
  trained, _ = tune.partition(attached.shapes(shape)['params'], rules)
  sizes = {name: x.size for name, x in trees.flatten(trained).items()}
  head = sum(size for name, size in sizes.items() if name.startswith('head/'))
  ours, tasks, classes = sum(sizes.values()) - head, 24, 2_113
  assert ours == tuned
  backbone = 85_798_656
  total = tasks * ours + head * classes + backbone * (section['method'] != 'full')
  assert ratio is None or f'{total / backbone:.2f}' == ratio
