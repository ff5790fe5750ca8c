"""Odd, broken and hostile files are decoded, or reported as bad images in one line."""

import json
import os
import re
import warnings

import numpy as np
import pytest

from tests.support import GOLDEN, hostile_images
from vit_jax import cli
from vit_jax.data import bad_images, pipeline
from vit_jax.data.single_image import SingleImage
from vit_jax.errors import BadImage
from vit_jax.tools import predict

PP = 'decode(3, precise=True)|resize(16)|value_range(-1, 1)'


def check(folder, tmp_path, thorough):
  """Reads all cases as training does and as `predict` does.

  Returns ({path: why training calls it bad}, the same for `predict`, {path: case}).
  """
  root, log = tmp_path / 'root', str(tmp_path / 'bad.jsonl')
  names = {str(path): name for name, path in hostile_images.cases(folder, thorough)}
  # As a class of its own in a folder of classes, as users have it.
  odd = root / 'train' / 'odd'
  (root / 'train' / 'fine').mkdir(parents=True)
  os.rename(folder, odd)
  cases = {path.replace(str(folder), str(odd)): name for path, name in names.items()}
  for i in range(8):
    hostile_images.picture(seed=i).save(root / 'train' / 'fine' / f'{i}.png')

  data = pipeline.EvalBatches(
    f'folder:{root}', 'train', PP, 16, bad_log=log, max_bad_fraction=1.0
  )
  decoded = {
    data.source.name_of(int(index)): bool(mask)
    for batch in data.iterate()
    for index, mask in zip(batch['index'], batch['mask'], strict=True)
    if index >= 0
  }
  trained = {line['path']: line['reason'] for line in bad_images.read_log(log)}
  assert set(trained) == {path for path, whole in decoded.items() if not whole}
  assert not any('{{' in reason or len(reason) > 300 for reason in trained.values())
  assert [whole for path, whole in decoded.items() if '/fine/' in path] == [True] * 8

  predicted, one = {}, SingleImage(PP)
  # Both list the same files; neither follows a name that leads to a folder.
  paths = predict.find_images([str(root)])
  assert set(paths) == set(decoded)
  for path in paths:
    try:
      pixels = one(path)
      assert pixels.shape == (16, 16, 3)
      assert np.isfinite(pixels).all()
    except BadImage as error:
      predicted[path] = str(error)
  assert not any('\n' in reason for reason in [*trained.values(), *predicted.values()])
  missing = {name for path, name in cases.items() if path not in decoded}
  assert missing == {'odd: a folder', 'odd: a link to its folder'}
  return trained, predicted, cases


def test_some_are_images_or_bad_ones(tmp_path):
  each_is_an_image_or_a_bad_one(tmp_path, thorough=False)


@pytest.mark.faults
def test_each_is_an_image_or_a_bad_one(tmp_path, capsys, faults_table):
  both, predicted = each_is_an_image_or_a_bad_one(tmp_path, thorough=True)
  for name, (why, _) in both.items():
    outcome = 'refused' if why else 'handled'  # as a bad image; as the image it is
    faults_table('image files', name, outcome, why or '')
  # The command itself.
  capsys.readouterr()
  weights = str(GOLDEN / 'vit_google_token.npz')
  assert cli.run(predict.main, [weights, str(tmp_path / 'root'), '--json']) == 0
  out, error = capsys.readouterr()
  images = {x['path']: x.get('error') for x in json.loads(out)['images']}
  assert error == ''
  assert {path: why for path, why in images.items() if why} == predicted


def each_is_an_image_or_a_bad_one(tmp_path, thorough):
  """Returns ({case: (why it is bad in training, in predict)}, {path: the latter})."""
  warnings.filterwarnings('ignore', module=r'PIL\.')  # as `cli.run` does
  trained, predicted, moved = check(tmp_path / 'odd', tmp_path, thorough)
  assert len(moved) >= (250 if thorough else 80)
  both = {moved[path]: (trained.get(path), predicted.get(path)) for path in moved}
  for name, verdicts in both.items():
    if re.match('good|odd: (a good|not UTF-8|a line|quotes|a long|other|an opt)', name):
      assert verdicts == (None, None), name
  reasons = {'a FIFO': 'regular', 'to itself': 'links', '/dev/zero': 'regular'}
  reasons |= {'6 GiB': f'{256 << 20:,}', 'a socket': 'regular', '/dev/null': 'regular'}
  for kind, reason in reasons.items():
    ((trained_as, predicted_as),) = [v for name, v in both.items() if kind in name]
    assert reason in trained_as, kind
    assert trained_as == predicted_as
  # Decoders differ on files with a byte too many or too few.
  differ = {name for name, (a, b) in both.items() if bool(a) != bool(b)}
  assert len(differ) <= len(both) // 20, differ
  return both, predicted
