"""Folders as on the hub: those that timm saves load here, those that we push load there.

Run by `make peer`, see test_peers.py.
"""

import dataclasses

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.support import GOLDEN
from tests.support.peers import MARKS, TOKENS, agree, images, ours, randomise, theirs
from vit_jax import cli, imagenet, inference, weights
from vit_jax.tools import push

pytestmark = MARKS


@pytest.mark.parametrize(
  'name',
  [
    'deit_tiny_patch16_224',
    'flexivit_small',
    'vit_base_patch16_siglip_224',
    'vit_base_patch32_siglip_256',  # the tanh GELU, which its config does not say
    'vit_base_patch16_siglip_gap_224',
  ],
)
def test_models_by_the_architecture_in_their_config(torch, timm, tmp_path, name):
  model = randomise(torch, timm.create_model(name, num_classes=10), 0.02)
  timm.models.save_for_hf(model, tmp_path / 'a', safe_serialization=True)
  size = model.pretrained_cfg['input_size'][1]
  x = images(size, 1)
  agree(ours(tmp_path / 'a', x), theirs(torch, model, x), 2 * TOKENS)


def test_names_are_those_of_timm(timm, tmp_path):
  for ours_, theirs_ in (
    ('imagenet1k', 'imagenet-1k'),
    ('imagenet21k', 'imagenet-21k-goog'),
    ('imagenet22k', 'imagenet-22k'),
    ('imagenet12k', 'imagenet-12k'),
    ('imagenet21k_miil', 'imagenet-21k-miil'),
  ):
    info = timm.data.ImageNetInfo(theirs_)
    assert imagenet.wordnet_ids(ours_) == info.label_names()
    assert imagenet.class_names(ours_) == info.label_descriptions()


def photo(path):
  rng = np.random.default_rng(0)
  smooth = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8))
  smooth.resize((120, 90), Image.BICUBIC).save(path)
  return path


def pushed(source, folder, to):
  args = [source, 'me/mine', '--dry_run', '--format', to, '--out', folder]
  assert cli.run(push.main, [str(arg) for arg in args]) == 0
  return folder


PIPELINES = {
  'squash': "decode|resize((32, 32), method='bicubic', antialias=True, "
  "rounding='nearest')|value_range(-1, 1)",
  'crop': "decode|resize_small(40, method='bicubic', antialias=True, "
  "rounding='nearest')|central_crop(32)|value_range((-2.0, -1.8, -1.2), (3.0, 2.2, 0.8))",
}


@pytest.fixture(params=PIPELINES)
def source(request, tmp_path):
  """A folder of weights with a pipeline of its own."""
  origin = weights.read(GOLDEN / 'vit_google_token.npz')
  changed = dataclasses.replace(origin, pp=PIPELINES[request.param])
  weights.write(changed, tmp_path / 'source', 'timm')
  return tmp_path / 'source'


def check_pixels_and_logits(torch, model, folder, pixels, path):
  loaded = vit_jax.load(folder)
  mine, x = loaded.preprocess([path]), pixels.numpy().transpose(0, 2, 3, 1)
  # Pillow resizes in fixed point, and rounds some levels the other way (13 % of them
  # here): by one of 255, in a range of up to 5.
  np.testing.assert_allclose(mine, x, atol=5.01 / 255)
  assert (np.abs(mine - x) > 0.5 / 255).mean() < 0.2
  found = inference.predict_images(loaded, [path]).logits
  agree(found, theirs(torch, model, mine), TOKENS)


def test_what_is_pushed_for_timm_is_the_same_model(torch, timm, tmp_path, source):
  folder = pushed(source, tmp_path / 'a', 'timm')
  model = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
  config = timm.data.resolve_model_data_config(model)
  path = photo(tmp_path / 'a.png')
  pixels = timm.data.create_transform(**config)(Image.open(path))[None]
  check_pixels_and_logits(torch, model, folder, pixels, path)


def test_what_is_pushed_for_transformers_is_the_same_model(
  torch,
  transformers,
  tmp_path,
  source,
):
  folder = pushed(source, tmp_path / 'a', 'hf')
  processor = transformers.AutoImageProcessor.from_pretrained(folder)
  model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
  path = photo(tmp_path / 'a.png')
  pixels = processor(Image.open(path), return_tensors='pt')['pixel_values']
  check_pixels_and_logits(torch, model, folder, pixels, path)
