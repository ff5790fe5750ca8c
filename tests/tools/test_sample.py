"""The files of `vit_jax sample`: a model that knows its digits, and a photograph."""

import json

import numpy as np

from tests.support import commands
from vit_jax import inference, weights
from vit_jax.data import sources
from vit_jax.tools import predict, sample


def test_the_sample_model_knows_digits(tmp_path, capsys):
  assert commands.run(sample.main, capsys, tmp_path / 'new')[0] == 0
  model, photo, seven = (
    tmp_path / 'new' / x for x in ('digits.npz', 'photo.jpg', 'seven.png')
  )
  args = predict.main, capsys, model, seven, photo, '--threshold', 0.9, '--json'
  images = json.loads(commands.run(*args)[1])['images']
  assert [[x['name'] for x in image['top']] for image in images] == [['7'], []]
  digits = sources.build('digits', 'test')
  images = [example['image'] for example in digits.read(np.arange(len(digits)))]
  logits = inference.predict_images(weights.load(model), images).logits
  assert (logits.argmax(-1) == digits.labels).mean() > 0.99
  # The same files again, but never over another file.
  assert commands.run(sample.main, capsys, tmp_path / 'new')[0] == 0
  photo.write_text('mine')
  commands.assert_refused(sample.main, capsys, [tmp_path / 'new'], ('photo.jpg', 'DIR'))
  assert photo.read_text() == 'mine'
