"""The lock of a run in a bucket: an object with a lease, which its holder renews."""

import os
import threading

import pytest

from tests.support import emulator, naming
from vit_jax import errors
from vit_jax.train import lease, lock

pytestmark = pytest.mark.usefixtures('gcs_without_tensorflow')


@pytest.fixture
def fast(monkeypatch):
  """Lets a lease be renewed, and looked at, often: a live run is noticed at once."""
  monkeypatch.setattr(lease, 'RENEW', 0.2)
  monkeypatch.setattr(lease, '_LOOK', 0.1)


@pytest.fixture
def short(fast, monkeypatch):
  """Lets a lease end after a second, where no run renews it.

  Ages are in whole seconds: on a busy machine a live run may lose so short a lease.
  """
  monkeypatch.setattr(lease, 'LEASE', 1.0)


@pytest.mark.slow
def test_a_second_run_is_refused_while_the_first_lives(
  gcs_folder, fast, gcs_proxy, capfd, monkeypatch
):
  monkeypatch.setattr(lease, 'LEASE', 10.0)  # a busy machine may renew a second late
  emulator.fails(gcs_proxy, 3)  # renewed all the same
  with lock.lock(gcs_folder) as held:
    assert held.workdir == gcs_folder
    with pytest.raises(errors.UserError, match=naming(gcs_folder, os.getpid())):
      lease.Lease(gcs_folder / lock.LOCK_FILE).take()
    held.check()
  assert 'waiting' in capfd.readouterr().err
  with lock.lock(gcs_folder):  # at once: the first gave it up
    pass
  assert 'waiting' not in capfd.readouterr().err


def test_the_lock_of_a_dead_run_ends(gcs_folder, short, monkeypatch, capfd):
  monkeypatch.setattr(lease, '_machine', lambda: 'another')
  dead = lease.Lease(gcs_folder / lock.LOCK_FILE)
  dead._write(0)  # and no renewals: its process was killed
  alive = lease.Lease(gcs_folder / lock.LOCK_FILE)
  alive.take()
  assert 'waiting' in capfd.readouterr().err
  alive.check()
  dead._renew()  # it was not dead, only asleep
  with pytest.raises(errors.LockLost, match=naming(gcs_folder, os.getpid())) as caught:
    dead.check()
  assert caught.value.exit_code == 75
  dead.release()
  alive.check()
  alive.release()


def test_the_lock_of_a_dead_process_of_this_machine_holds_nothing(gcs_folder, capfd):
  gone = threading.Thread(target=lambda: None)
  gone.start()
  gone.join()
  dead = lease.Lease(gcs_folder / lock.LOCK_FILE)
  dead._holder['pid'] = 2**22 + 1  # above the largest that Linux gives
  dead._write(0)
  with lock.lock(gcs_folder):
    pass
  assert 'waiting' not in capfd.readouterr().err


@pytest.mark.parametrize(
  'content',
  [
    b'{',
    *(
      pytest.param(x, marks=pytest.mark.slow) for x in (b'', b'[1]', b'{"lease": "x"}')
    ),
  ],
)
def test_a_damaged_lock_ends_too(gcs_folder, short, content):
  (gcs_folder / lock.LOCK_FILE).write_bytes(content)
  with lock.lock(gcs_folder):
    pass


def test_a_lock_is_renewed_after_a_refusal_that_passed(gcs_folder, monkeypatch):
  held, tries = lease.Lease(gcs_folder / lock.LOCK_FILE), []

  def renew():
    tries.append(len(tries))
    if len(tries) == 3:
      held._released.set()
    raise errors.NotAllowed('the token has expired')

  monkeypatch.setattr(lease, 'RENEW', 0.001)
  monkeypatch.setattr(held, '_renew', renew)
  held._renew_often()
  assert tries == [0, 1, 2]


def test_of_many_that_want_a_lock_one_gets_it(gcs_folder, fast):
  got, refused = [], []

  def want():
    wanted = lease.Lease(gcs_folder / lock.LOCK_FILE)
    try:
      wanted.take()
      got.append(wanted)
    except errors.UserError as error:
      refused.append(error)

  threads = [threading.Thread(target=want) for _ in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert (len(got), len(refused)) == (1, 5)
  got[0].release()
