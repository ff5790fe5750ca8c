"""The images that a model takes, and those that it refuses with a message."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.support import GOLDEN, naming
from vit_jax import models
from vit_jax.errors import BadImage, UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
FLOATS = PIXELS.astype(np.float32) / 127.5 - 1


@pytest.fixture(scope='module')
def loaded():
  return vit_jax.load(GOLDEN / 'vit_google_token.npz')


def test_every_kind_of_image_becomes_the_same_array(loaded, tmp_path):
  path = tmp_path / 'a.png'
  Image.fromarray(PIXELS[0]).save(path)
  one = [str(path), path, path.read_bytes(), Image.open(path), PIXELS[0]]
  for image in one:
    np.testing.assert_allclose(
      vit_jax.preprocess([image], loaded), FLOATS[:1], rtol=0, atol=1e-6
    )
  # 1e-6: one rounding of numbers up to 1.
  for batch in (PIXELS, jnp.asarray(PIXELS), list(PIXELS), iter(PIXELS)):
    np.testing.assert_allclose(
      vit_jax.preprocess(batch, loaded), FLOATS, rtol=0, atol=1e-6
    )
  gray = vit_jax.preprocess([PIXELS[0, ..., 0]], pp='decode(1)|value_range(0, 1)')
  assert gray.shape == (1, 32, 32, 1)
  logits, _ = jax.jit(loaded.model.apply)(loaded.variables, FLOATS)
  again, _ = jax.jit(loaded.model.apply)(loaded.variables, loaded.preprocess(PIXELS))
  np.testing.assert_allclose(logits, again, atol=1e-5)


@pytest.mark.parametrize(
  ('images', 'facts'),
  [
    ('a.jpg', ('str', 'list')),
    (Image.new('RGB', (8, 8)), ('Image', 'list')),
    (PIXELS[0], ('images', (32, 32, 3), '[B, H, W, C]')),
    ([], ('No images',)),
    (FLOATS, ('image 0', 'float32', 'uint8')),
    (
      [PIXELS[0], PIXELS[1].transpose(2, 0, 1)],
      ('image 1', (3, 32, 32), '[H, W, 1 or 3]'),
    ),
    (['nowhere.jpg'], ('image 0', 'nowhere.jpg')),
  ],
)
def test_other_inputs_are_refused(loaded, images, facts):
  # One class to catch, and a subclass where a single image is to blame.
  with pytest.raises(UserError, match=naming(*facts)) as caught:
    vit_jax.preprocess(images, loaded)
  assert isinstance(caught.value, BadImage) == facts[0].startswith('image ')


def test_a_pipeline_is_given_once_and_makes_one_size(loaded):
  for options in ({}, {'loaded': loaded, 'pp': 'decode'}):
    with pytest.raises(ValueError, match=naming('loaded', 'pp')):
      vit_jax.preprocess(PIXELS, **options)
  two = [PIXELS[0], PIXELS[1, :16]]
  with pytest.raises(UserError, match=naming((32, 32, 3), (16, 32, 3))):
    vit_jax.preprocess(two, pp='decode|value_range(-1, 1)')


@pytest.mark.parametrize('name', ['vit', 'mixer', 'resnet', 'swin'])
def test_models_refuse_what_would_be_wrong_numbers(name):
  model = models.build(name, **models.family(name).tiny[0], num_classes=3)
  # Shapes alone: nothing is computed.
  variables = jax.eval_shape(model.init, jax.random.key(0), FLOATS)
  apply = lambda x: jax.eval_shape(model.apply, variables, x)
  assert apply(FLOATS)[0].shape == (2, 3)
  assert apply(jnp.asarray(FLOATS, jnp.bfloat16))[0].shape == (2, 3)
  with pytest.raises(UserError, match=naming('uint8', 'floats', 'vit_jax.preprocess')):
    apply(PIXELS)
  with pytest.raises(UserError, match=naming((2, 3, 32, 32), 'transpose')):
    apply(FLOATS.transpose(0, 3, 1, 2))
  with pytest.raises(UserError, match=naming((32, 32, 3), '[B, H, W, C]', 'None')):
    apply(FLOATS[0])


@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize(
  ('name', 'facts'), [('vit', ('8x8', 65, 17, 'image_size')), ('mixer', (64, 16))]
)
def test_images_of_another_size_than_the_parameters(name, facts, scan):
  (fields,) = models.family(name).tiny[:1]
  model = models.build(name, **fields, num_classes=3, scan=scan)
  variables = jax.eval_shape(model.init, jax.random.key(0), FLOATS)
  with pytest.raises(UserError, match=naming(*facts)):
    jax.eval_shape(model.apply, variables, np.zeros((1, 64, 64, 3), np.float32))
