"""Pre-training at scale, on fake data: from an archive to a run that is killed and resumed."""

import random
import signal
import time

import pytest

from tests.support import archives, runs
from vit_jax import cli
from vit_jax.tools import prepare

STEPS = 40


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """The folder of the 2,000 images that `prepare` made of the archive."""
  folder = tmp_path_factory.mktemp('data')
  archives.imagenet21k(folder / 'winter21_whole.tar.gz')
  arguments = ['--from', f'{folder}/winter21_whole.tar.gz', '--data_dir', str(folder)]
  assert cli.run(prepare.main, ['imagenet21k', *arguments]) == 0
  return folder / 'imagenet21k' / '1.0.0'


def command(prepared, workdir):
  arguments = f'debug,data=records:{prepared},train=full[:90%],val=full[90%:]'
  keys = {'image_key': 'image', 'label_key': 'label'}
  return [
    f'--config=configs/vit_jft.py:{arguments},classes=20,eval_every=20,fewshot=',
    f'--workdir={workdir}',
    f'--config.data.source_options={keys}',
    f'--config.evals.val.data.source_options={keys}',
    *('--config.epochs=None', f'--config.steps={STEPS}', '--config.checkpoint.every=5'),
    *('--config.log.every=1', '--config.log.tensorboard=False'),
  ]


@pytest.mark.faults  # what each part owes is tested with that part
def test_a_run_on_prepared_records_is_killed_and_goes_on(
  prepared, tmp_path, faults_table
):
  shared = dict(
    JAX_COMPILATION_CACHE_DIR=str(tmp_path / 'compiled'),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
  )
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  code, _, error = runs.Process(*command(prepared, whole), **shared).end()
  assert (code, error) == (0, '')
  losses = [row['train/loss'] for row in runs.rows(whole) if 'train/loss' in row]
  assert losses[-1] < losses[0]
  (last,) = (r for r in runs.rows(whole) if r['step'] == STEPS and 'val/examples' in r)
  assert last['val/examples'] == 200

  rng = random.Random(0)
  process = runs.Process(*command(prepared, killed), **shared)
  process.until_step(rng.randint(7, 20))
  time.sleep(rng.uniform(0, 0.05))
  process.popen.kill()
  assert process.end()[0] == -signal.SIGKILL
  code, _, error = runs.Process(*command(prepared, killed), **shared).end()
  assert (code, error) == (0, '')
  assert runs.status(killed) == runs.status(whole)
  assert runs.rows(killed) == runs.rows(whole)
  faults_table('kills, one process', 'on prepared records', 'handled')
