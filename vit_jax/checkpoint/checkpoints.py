"""Checkpoints that are checked: a fingerprint per leaf, and a way back to older ones.

One step is one folder, `<directory>/<step>`, with the items `params`, `ema` and
`batch_stats` (if the state has them), `train` (all other fields of the state) and
`meta`, see `manifest`.
Orbax (see `storage`) does not notice flipped bits or a changed dtype, and does not fall
back to an older step: that is here, in `verified` and in `retention`.

Frozen parameters are not stored: only their names and fingerprints are. The caller
that restores passes them, read again from the weights that the run started from, and gets
an error unless every bit is as it was. To read the parameters of any run:

  saved = Checkpoints(folder)
  frozen = read_weights() if saved.frozen() else {}  # {name: array}, maybe of more
  params, meta = saved.restore_params(abstract_params, frozen=frozen)

Several processes: every call is collective, process 0 decides. The step folders lie on
a file system that all of them share, or in a bucket.
"""

import contextlib
import dataclasses
import math
from typing import Any

from vit_jax import buckets, distributed, trees
from vit_jax.check import Count, Period
from vit_jax.checkpoint import manifest, verified
from vit_jax.checkpoint.fingerprint import survey
from vit_jax.checkpoint.manifest import Damaged, and_more
from vit_jax.checkpoint.retention import Retention
from vit_jax.checkpoint.storage import Storage
from vit_jax.errors import NoUsableCheckpoint, Unreachable, UserError


class Checkpoints:
  """The checkpoints of one run. Call `close` at the end, also after an error.

  Args:
    directory: a folder on a local or mounted file system, or gs://BUCKET/PATH; made at
      the first save.
    every: steps between two saves, for the caller, which decides when to save.
    keep_latest: number of newest steps to keep; at least 2 leave one to fall back to.
    keep_every: multiples of this many steps are kept for good; None: none are.
    best: name of a metric: the step where it was best is kept. A step saved without that
      metric, or with a non-finite one, is never the best.
    larger_is_better: of that metric.

  Raises:
    UserError: for a number below 1, or a URL of another kind as directory.
  """

  def __init__(
    self,
    directory,
    *,
    every: Period = 1000,
    keep_latest: Count = 3,
    keep_every: Period | None = None,
    best: str | None = None,
    larger_is_better: bool = True,
  ):
    self.directory = buckets.path(directory).absolute()
    self.every, self.best = every, best
    self._retention = Retention(
      latest=keep_latest,
      every=keep_every,
      best=best,
      larger_is_better=larger_is_better,
      steps=lambda: self._storage.steps(),
      read=self._read,
    )
    self._storage = Storage(self.directory, self._retention.kept)

  def latest(self) -> int | None:
    """Returns the newest complete step, or None. It may turn out to be damaged."""
    return max(self._storage.steps(), default=None)

  def best_step(self) -> int | None:
    """Returns the complete step where the metric `best` was best, or None."""
    return self._retention.best(self._storage.steps())

  # -- saving -----------------------------------------------------------------------

  def save(self, state, meta: dict, metrics: dict | None = None) -> bool:
    """Starts saving `state` and returns; its buffers may be donated at once.

    Blocks until `state` is computed, fingerprinted and copied to the host, and the
    previous save is complete. Evaluate first: a saved step's metrics never change.

    Args:
      state: a dataclass pytree with the fields `step` (integer scalar), `params`,
        `frozen` (nested dicts like params, not stored), `ema` (a tree like params, or
        None), `batch_stats` (nested dicts, may be empty) and any others.
      meta: JSON-serialisable; comes back from `restore` (tuples as lists).
      metrics: name -> number, see `best`.

    Returns:
      True if this step is on disk, or will be once the save completes. False if it
      holds a non-finite number (reported on stderr): a poisoned state never pushes out
      a good one.

    Raises:
      DiskFull: now, or because the previous save failed. Older steps are intact.
    """
    flat = manifest.named(manifest.items_of(state))
    prints, bad = survey(flat)
    step = int(state.step)
    if poisoned := [name for name in flat if bad[name]]:
      distributed.say(
        f'checkpoint step {step} not saved: {bad[poisoned[0]]} non-finite numbers in '
        f'{and_more(poisoned)}'
      )
      return False
    self._storage.wait()
    if distributed.from_first(step in self._storage.steps()):
      return True
    sealed = manifest.sealed(step, flat, prints, meta, metrics or {})
    self._retention.saved(sealed['body'])
    stored = {name: x for name, x in flat.items() if not manifest.is_frozen(name)}
    self._storage.write(step, trees.unflatten(stored), sealed)
    return True

  def saving(self) -> bool:
    """Whether a save is under way."""
    return self._storage.writing()

  def wait(self) -> None:
    """Blocks until the save under way is complete.

    Raises:
      DiskFull: if there was no room for it; the steps before it are intact.
    """
    self._storage.wait()

  def close(self) -> None:
    """Waits as `wait` does, and ends the threads that write; `save` starts new ones.

    Without it, a save that is under way when Python exits is lost.
    """
    self._storage.close()

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    """Closes; after an outage, without waiting for a save to the bucket to complete."""
    if kind and issubclass(kind, Unreachable) and buckets.is_url(self.directory):
      self._storage.abandon()
    else:
      self.close()

  # -- restoring --------------------------------------------------------------------

  def restore(self, abstract, frozen: dict | None = None) -> tuple[Any, dict] | None:
    """Returns `(state, meta)` of the newest step whose every bit is as it was saved.

    A damaged step is reported in one line on stderr and, once an older one has been
    restored, renamed to `<step>.corrupt`. Nothing is ever deleted.

    Args:
      abstract: the state with `jax.ShapeDtypeStruct` leaves that carry the shardings
        to restore to: any mesh, not only the one that saved.
      frozen: name -> array, at least of the parameters in `abstract.frozen`.

    Returns:
      None if no step was ever completed here.

    Raises:
      UserError: names, shapes or dtypes saved differ from `abstract`: the run was
        configured otherwise; or bits of `frozen` differ. Nothing is renamed.
      NoUsableCheckpoint: there are checkpoints, all damaged. They keep their names,
        so that the next start says the same instead of starting over.
    """
    found = self._load(manifest.items_of(abstract), frozen or {})
    if found is None:
      return None
    items, body, damaged = found
    for step, why in damaged.items():
      distributed.say(
        f'checkpoint step {step} is damaged ({why}); set aside as '
        f'{self._storage.set_aside(step)}; using step {body["step"]}'
      )
    train = items.pop('train')
    return dataclasses.replace(abstract, **items, **train), body['meta']

  def check(self, abstract, frozen: dict | None = None) -> None:
    """Refuses, as `restore` would, a state of another structure or other frozen bits.

    It reads no arrays, and finds no damage.

    Raises:
      UserError: as `restore`.
    """
    bound = math.inf
    while (bound := self._newest_below(bound)) >= 0:
      with contextlib.suppress(Damaged):  # left to `restore`
        body = self._read(bound)
        items = manifest.items_of(abstract)
        return verified.check(self._storage, body, items, frozen or {})

  def restore_params(
    self,
    abstract: dict,
    *,
    frozen: dict | None = None,
    ema: bool = False,
    step: int | str | None = None,
  ) -> tuple[dict, dict]:
    """Returns `(params, meta)`, see `restore_variables`."""
    options = dict(frozen=frozen, ema=ema, step=step)
    variables, meta = self.restore_variables({'params': abstract}, **options)
    return variables['params'], meta

  def restore_variables(
    self,
    abstract: dict,
    *,
    frozen: dict | None = None,
    ema: bool = False,
    step: int | str | None = None,
  ) -> tuple[dict, dict]:
    """Returns `(variables, meta)`; neither the optimizer nor anything else is read.

    Only reads: safe in the folder of a run at work.

    Args:
      abstract: {'params': ...} and maybe 'batch_stats', nested dicts of
        `jax.ShapeDtypeStruct`, see `restore`; a leaf without sharding goes to one device.
        Without those that `frozen()` names, what was trained is returned alone.
      frozen: name -> array, at least of the parameters that `frozen()` names.
      ema: the averaged parameters in place of the last ones.
      step: a step, 'best' (see `best`), or None: the newest that is not damaged.

    Raises:
      UserError: no such step, no EMA saved, another structure than `abstract`, or other
        bits in `frozen`.
      NoUsableCheckpoint: what was asked for is damaged.
    """
    item = 'ema' if ema else 'params'
    stats = {trees.STATS: x} if (x := abstract.get(trees.STATS)) else {}
    wanted = {item: abstract['params'], **stats}
    if ema:  # which averages the statistics as well
      wanted = {item: abstract['params'] | stats}
    items, body, damaged = self._load(wanted, frozen or {}, self._find(step))
    for bad, why in damaged.items():
      distributed.say(
        f'checkpoint step {bad} is damaged ({why}); using step {body["step"]}'
      )
    params = trees.combine(items.pop(item), items.pop('frozen', {}))
    if ema and stats:
      items[trees.STATS] = params.pop(trees.STATS)
    return {'params': params, **items}, body['meta']

  def frozen(self, step: int | str | None = None) -> list[str]:
    """Returns the names of the parameters that a run did not train; see the module.

    Raises: as `meta`.
    """
    return manifest.frozen_names(self._body(step)['leaves'])

  def meta(self, step: int | str | None = None) -> dict:
    """Returns the dict saved with `step`; None: with the newest where it is readable.

    Raises: as `restore_params`.
    """
    return self._body(step)['meta']

  def _body(self, step) -> dict:
    step = self._find(step)
    steps = sorted(self._storage.steps(), reverse=True) if step is None else [step]
    for known in steps:
      with contextlib.suppress(Damaged):
        return self._read(known)
    raise NoUsableCheckpoint(f'No checkpoint in {self.directory} has readable meta.')

  def _find(self, step):
    steps = sorted(self._storage.steps())
    if step == 'best':
      step = self._retention.best(steps)
      if step is None:
        raise UserError(
          f'No step in {self.directory} has a finite metric {self.best!r}, which '
          "Checkpoints(best=...) names: step='best' needs one."
        )
    elif not steps or (step is not None and step not in steps):
      raise UserError(
        f'No checkpoint {"" if step is None else f"step {step} "}in {self.directory}; '
        f'steps there: {steps or "none"}.'
      )
    return step

  def _load(self, items, frozen: dict, step: int | None = None):
    # -> (items, body, damaged: step -> why) of `step`, or of the newest intact one;
    # None where no step was ever completed.
    damaged = {}
    bound = math.inf if step is None else step + 1
    while (bound := self._newest_below(bound)) >= 0:
      try:
        return *verified.read(self._storage, bound, items, frozen), damaged
      except Damaged as error:
        damaged[bound] = str(error)
      if step is not None:
        break
    aside = sorted(path.name for path in self.directory.glob('*.corrupt*'))
    if not damaged and not aside:
      return None
    found = [f'step {s}: {why}' for s, why in damaged.items()] or aside
    raise NoUsableCheckpoint(
      f'No checkpoint in {self.directory} can be restored; damaged: '
      f'{"; ".join(found)}. Nothing was deleted or renamed. Bring back a good copy, '
      'or move that folder away or choose another workdir to start from the beginning.'
    )

  def _read(self, step) -> dict:
    return verified.read_body(self._storage, step)

  def _newest_below(self, bound) -> int:
    below = (s for s in self._storage.steps() if s < bound)
    return distributed.from_first(max(below, default=-1))
