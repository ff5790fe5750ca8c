"""The tool `prepare`, from an archive to batches; its messages."""

import json
import re

import numpy as np

from tests.support import archives, naming
from tests.support.archives import CLASSES, EACH
from vit_jax import cli
from vit_jax.data import pipeline
from vit_jax.tools import prepare


def run(*args):
  return cli.run(prepare.main, [str(a) for a in args])


def test_imagenet21k_from_archive_to_batches(tmp_path, monkeypatch, capsys):
  archive = tmp_path / 'winter21_whole.tar.gz'
  archives.imagenet21k(archive)
  args = ('imagenet21k', '--from', archive, '--data_dir', tmp_path)
  assert run(*args, '--json') == 0
  output = capsys.readouterr()
  assert '\r' not in output.err
  record = json.loads(output.out)  # and nothing else
  assert record['num_classes'] == CLASSES
  assert record['splits'] == {'full': CLASSES * EACH}
  bad = {name.rpartition('_')[2]: reason for name, reason in record['broken'].items()}
  assert 'empty' in bad['empty.JPEG']
  assert 'truncated' in bad['broken.JPEG']

  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  pp = 'decode|resize(8)|value_range(-1, 1)'
  batches = pipeline.TrainBatches('tfds:imagenet21k', 'full', pp, 250)
  assert batches.class_names == [f'n{1000 + 37 * c:08d}' for c in range(CLASSES)]
  epoch = [b for _, b in zip(range(8), batches.iterate(), strict=False)]
  labels = np.concatenate([b['label'] for b in epoch])
  assert np.bincount(labels).tolist() == [EACH] * CLASSES
  assert all(b['mask'].all() for b in epoch)
  # Every image under its own class's label; JPEG keeps a grey to a level or two.
  shown = np.concatenate([b['image'].mean((1, 2, 3)) for b in epoch])
  assert np.abs(shown - (10 * labels + 20)).max() <= 2
  # A part is a random one: 100 of 2,000 miss a class of 20 in 12 of 1,000 draws.
  part = pipeline.TrainBatches('tfds:imagenet21k', 'full[:100]', pp, 100)
  (batch,) = [b for _, b in zip(range(1), part.iterate(), strict=False)]
  assert len(set(batch['label'].tolist())) >= 18

  assert run(*args) == 2
  assert re.search(naming('imagenet21k/1.0.0', '--version'), capsys.readouterr().err)
