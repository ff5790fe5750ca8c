"""Checkpoints that are checked: a fingerprint per leaf, and a way back to older ones.

One step is one folder, `<directory>/<step>`, with the items `params`, `ema` (if the
state has one), `train` (all other fields of the state) and `meta`: JSON with the
caller's dict, versions, and name, shape, dtype and fingerprint of every leaf, under a
checksum of its own. Leaves are stored by path name, so that no container type of an
optimizer is part of the format.

Orbax writes (asynchronously, committed by a rename) and deletes; what it does not do is
notice flipped bits, a changed dtype, or an older step that would do: that is here.

Several processes: every call is collective, process 0 decides. The step folders lie on
a file system that all of them share.
"""

import contextlib
import dataclasses
import gc
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from vit_jax import trees
from vit_jax.checkpoint.fingerprint import fingerprints, survey
from vit_jax.errors import DiskFull, NoUsableCheckpoint, UserError

FORMAT = 1

# Free space asked for, in sizes of the state: array files have some overhead, and the
# oldest step is deleted only after the new one is complete.
_DISK_MARGIN = 1.1


class _Damaged(Exception):
  """This step cannot be restored as it was saved; the text says why."""


class Checkpoints:
  """The checkpoints of one run. Call `close` at the end, whatever happened.

  Args:
    directory: a folder on a local or mounted file system; made at the first save.
    every: `due(step)` is true at multiples of this many steps.
    keep_latest: number of newest steps to keep; at least 2 leave one to fall back to.
    keep_every: multiples of this many steps are kept for good; None: none are.
    best: name of a metric: the step where it was best is kept. Higher is better,
      unless the name ends with 'loss'. A step saved without that metric, or with a
      non-finite one, is never the best.

  Raises:
    UserError: for a number below 1, or a URL as directory.
  """

  def __init__(
    self,
    directory,
    *,
    every: int = 1000,
    keep_latest: int = 3,
    keep_every: int | None = None,
    best: str | None = None,
  ):
    numbers = dict(every=every, keep_latest=keep_latest, keep_every=keep_every)
    for name, number in numbers.items():
      if number is not None and number < 1:
        raise UserError(f'checkpoint.{name} is {number}; it must be at least 1.')
    if '://' in str(directory):
      raise UserError(
        f'Checkpoints go to a file system, not to {directory}: mount the bucket and '
        'give the path of the mount.'
      )
    self.directory = pathlib.Path(directory).absolute()
    self.every, self.keep_latest, self.keep_every = every, keep_latest, keep_every
    self.best = best
    self._scores: dict[int, float] = {}  # higher is better
    self._manager: _Manager | None = None
    self._under_way = (0, 0)  # step and bytes of the newest save

  def due(self, step: int) -> bool:
    """Returns whether `every` asks for a checkpoint after `step` steps."""
    return step % self.every == 0

  def latest(self) -> int | None:
    """Returns the newest complete step, or None. It may turn out to be damaged."""
    return max(self._steps(), default=None)

  # -- saving -----------------------------------------------------------------------

  def save(self, state, meta: dict, metrics: dict | None = None) -> bool:
    """Starts saving `state` and returns; its buffers may be donated at once.

    Blocks until `state` is computed, fingerprinted and copied to the host, and the
    previous save is complete. Evaluate first: a saved step's metrics never change.

    Args:
      state: a dataclass pytree with the fields `step` (integer scalar), `params`,
        `ema` (a tree like params, or None) and any others.
      meta: JSON-serialisable; comes back from `restore` (tuples as lists).
      metrics: name -> number, see `best`.

    Returns:
      True if the save was started; False if this step is there already, or if params
      or EMA hold a non-finite number (said on stderr: a poisoned state never pushes
      out a good one).

    Raises:
      DiskFull: now, or because the previous save failed. Older steps are intact.
    """
    flat = _named(_items(state))
    prints, bad = survey(flat)
    step = int(state.step)
    poisoned = [n for n in flat if bad[n] and n.split('/')[0] in ('params', 'ema')]
    if poisoned:
      _say(
        f'checkpoint step {step} not saved: {bad[poisoned[0]]} non-finite numbers in '
        f'{_and_more(poisoned)}'
      )
      return False
    self.wait()
    if _from_first(step in self._steps()):
      return False
    leaves = {n: [list(x.shape), str(x.dtype), prints[n]] for n, x in flat.items()}
    body = dict(
      format=FORMAT, step=step, versions=_versions(), meta=meta, leaves=leaves
    )
    body['metrics'] = {name: float(value) for name, value in (metrics or {}).items()}
    nested = trees.unflatten(flat)
    args = {item: ocp.args.StandardSave(tree) for item, tree in nested.items()}
    args['meta'] = ocp.args.JsonSave({'sha256': _sha256(body), 'body': body})
    self._under_way = step, sum(leaf.nbytes for leaf in flat.values())
    self._check_space()
    manager = self._writer()
    self._note_score(body)
    with self._disk_errors():
      # Whether to save was decided above and by the caller: Orbax shall not.
      return manager.save(step, args=ocp.args.Composite(**args), force=True)

  def wait(self):
    """Blocks until the save under way is complete.

    Raises:
      DiskFull: if there was no room for it; the steps before it are intact.
    """
    if self._manager:
      with self._disk_errors():
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

  def close(self):
    """Waits as `wait` does, and ends Orbax's threads; a later `save` starts new ones.

    Without it, a save that is under way when Python exits is lost.
    """
    try:
      self.wait()
    finally:
      manager, self._manager = self._manager, None
      if manager:
        manager.close()

  def _writer(self):
    # Made at the first save: reading needs none, so that a tool that looks into the
    # folder of a run at work does not sweep up the step that is being written.
    if self._manager is None:
      self._read_scores()
      keep = [policies.LatestN(self.keep_latest), _KeepBest(self)]
      if self.keep_every:
        keep.append(policies.EveryNSteps(self.keep_every))
      options = ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(keep),
        cleanup_tmp_directories=True,
        lightweight_initialize=True,  # else it reads all steps, damaged ones too
      )
      try:
        self._manager = _Manager(self.directory, options=options)
      except OSError as error:
        raise UserError(f'Cannot write checkpoints: {error}.') from error
    return self._manager

  def _check_space(self):
    folders = (self.directory, *self.directory.parents)
    free = shutil.disk_usage(next(p for p in folders if p.exists())).free
    if _from_first(free < _DISK_MARGIN * self._under_way[1]):
      raise self._disk_full(free)

  @contextlib.contextmanager
  def _disk_errors(self):
    try:
      yield
    except Exception as error:
      # TensorStore has a ValueError for everything, with the system's words in it.
      if 'No space left' in str(error) or 'quota exceeded' in str(error):
        raise self._disk_full(shutil.disk_usage(self.directory).free) from error
      raise

  def _disk_full(self, free):
    step, size = self._under_way
    return DiskFull(
      f'Disk full: checkpoint step {step} needs up to {_DISK_MARGIN * size / 1e6:,.1f} '
      f'MB in {self.directory}, where {free / 1e6:,.1f} MB are free. Nothing was '
      f'deleted; the newest complete step is {self.latest()}. Make room, or lower '
      f'checkpoint.keep_latest (now {self.keep_latest}), and run the same command again.'
    )

  # -- restoring --------------------------------------------------------------------

  def restore(self, abstract) -> tuple[Any, dict] | None:
    """Returns `(state, meta)` of the newest step whose every bit is as it was saved.

    A damaged step is reported in one line on stderr and, once an older one has been
    restored, renamed to `<step>.corrupt`. Nothing is ever deleted.

    Args:
      abstract: the state with `jax.ShapeDtypeStruct` leaves that carry the shardings
        to restore to: any mesh, whatever the one that saved.

    Returns:
      None if no step was ever completed here.

    Raises:
      UserError: names, shapes or dtypes saved differ from `abstract`: the run was
        configured otherwise. Nothing is renamed.
      NoUsableCheckpoint: there are checkpoints, all damaged. They keep their names,
        so that the next start says the same instead of starting over.
    """
    found = self._load(_items(abstract), everything=True)
    if found is None:
      return None
    items, body, damaged = found
    for step, why in damaged.items():
      _say(
        f'checkpoint step {step} is damaged ({why}); set aside as '
        f'{self._set_aside(step)}; using step {body["step"]}'
      )
    train = items.pop('train')
    return dataclasses.replace(abstract, **items, **train), body['meta']

  def restore_params(
    self, abstract, *, ema: bool = False, step: int | str | None = None
  ) -> tuple[Any, dict]:
    """Returns `(params, meta)`; neither the optimizer nor anything else is read.

    Only reads: safe in the folder of a run at work.

    Args:
      abstract: params as `jax.ShapeDtypeStruct`, see `restore`; a leaf without
        sharding goes to one device.
      ema: the averaged parameters in place of the last ones.
      step: a step, 'best' (see `best`), or None: the newest that is not damaged.

    Raises:
      UserError: no such step, no EMA saved, or another structure than `abstract`.
      NoUsableCheckpoint: what was asked for is damaged.
    """
    item = 'ema' if ema else 'params'
    items, body, damaged = self._load({item: abstract}, step=self._find(step))
    for bad, why in damaged.items():
      _say(f'checkpoint step {bad} is damaged ({why}); using step {body["step"]}')
    return items[item], body['meta']

  def meta(self, step: int | str | None = None) -> dict:
    """Returns the dict saved with `step`; None: with the newest where it is readable.

    Raises: as `restore_params`.
    """
    step = self._find(step)
    for known in sorted(self._steps(), reverse=True) if step is None else [step]:
      with contextlib.suppress(_Damaged):
        return self._read(known)['meta']
    raise NoUsableCheckpoint(f'No checkpoint in {self.directory} has readable meta.')

  def _find(self, step):
    steps = sorted(self._steps())
    if step == 'best':
      self._read_scores()
      step = self._best_of(steps)
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

  def _load(self, items, *, step: int | None = None, everything: bool = False):
    # -> (items, body, damaged: step -> why) of `step`, or of the newest intact one;
    # None where no step was ever completed.
    damaged = {}
    bound = math.inf if step is None else step + 1
    while (bound := self._newest_below(bound)) >= 0:
      try:
        return *self._load_step(bound, items, everything), damaged
      except _Damaged as error:
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

  def _load_step(self, step, items, everything):
    with _together():
      body = self._read(step)
    want = _named(items)
    saved = {
      name: (tuple(shape), dtype, print_)
      for name, (shape, dtype, print_) in body['leaves'].items()
      if everything or name.split('/')[0] in items
    }
    if wrong := _differences(saved, want):
      raise UserError(
        f'Checkpoint step {step} in {self.directory} is of another configuration: '
        f'{_and_more(wrong, 3)}. Use the config that wrote it, or another workdir.'
      )
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    nested = trees.unflatten(
      {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or one)
        for name, x in want.items()
      }
    )
    args = {item: ocp.args.StandardRestore(tree) for item, tree in nested.items()}
    with _together():
      flat = trees.flatten(self._orbax(step, args))
    prints = fingerprints(flat)
    wrong = [name for name in want if prints.get(name) != saved[name][2]]
    if wrong:
      raise _Damaged(f'checksum mismatch in {_and_more(wrong)}')
    leaves = [flat[name] for name in want]
    return jax.tree.unflatten(jax.tree.structure(items), leaves), body

  def _read(self, step) -> dict:
    stored = self._orbax(step, {'meta': ocp.args.JsonRestore()})['meta']
    try:
      body, expected = stored['body'], stored['sha256']
    except (TypeError, KeyError):
      raise _Damaged('meta is incomplete') from None
    if _sha256(body) != expected or body['step'] != step:
      raise _Damaged('checksum mismatch in meta')
    if body['format'] != FORMAT:
      raise UserError(
        f'Checkpoint step {step} in {self.directory} has format {body["format"]}; this '
        f'version reads {FORMAT}. Use the version that wrote it: {body["versions"]}.'
      )
    return body

  def _orbax(self, step, args) -> dict:
    path = self.directory / str(step)
    handler = ocp.CompositeCheckpointHandler()
    try:
      with _quiet(), ocp.Checkpointer(handler) as checkpointer:
        return dict(checkpointer.restore(path, args=ocp.args.Composite(**args)).items())
    except (MemoryError, jax.errors.JaxRuntimeError):
      raise  # the machine's trouble, not the checkpoint's
    except Exception as error:  # Orbax and TensorStore raise a dozen types
      if isinstance(error, PermissionError) or 'PERMISSION_DENIED' in str(error):
        raise UserError(f'Not allowed to read checkpoint {path}: {error}') from error
      line = ' '.join(str(error).split())
      raise _Damaged(f'{type(error).__name__}: {line[:150]}') from None

  # -- folders and scores -----------------------------------------------------------

  def _steps(self) -> list[int]:
    # Unfinished steps and those set aside have a suffix.
    if not self.directory.is_dir():
      return []
    return [int(p.name) for p in self.directory.iterdir() if p.name.isdecimal()]

  def _newest_below(self, bound) -> int:
    return _from_first(max((s for s in self._steps() if s < bound), default=-1))

  def _set_aside(self, step) -> pathlib.Path:
    source = self.directory / str(step)
    target, n, failure = source.with_suffix('.corrupt'), 1, None
    while target.exists():
      target, n = source.with_suffix(f'.corrupt{n}'), n + 1
    if jax.process_index() == 0:
      try:
        os.rename(source, target)
      except OSError as error:
        failure = error
    if not _all(failure is None):
      raise UserError(f'Cannot set aside damaged checkpoint {source}: {failure}.')
    return target

  def _read_scores(self):
    for step in self._steps() if self.best else ():
      with contextlib.suppress(_Damaged):
        self._note_score(self._read(step))

  def _note_score(self, body):
    score = body['metrics'].get(self.best, math.nan)
    if math.isfinite(score):
      self._scores[body['step']] = -score if self.best.endswith('loss') else score

  def _best_of(self, steps) -> int | None:
    scores = [(self._scores[step], step) for step in steps if step in self._scores]
    return max(scores)[1] if scores else None


class _Manager(ocp.CheckpointManager):
  """Orbax's manager, which does not ask for preemption: `preemption.py` does.

  Orbax polls with the step it saves, also from its background thread; a poll with an
  old number would move the agreed sync point into the past, where nobody stops.
  """

  def reached_preemption(self, step: int) -> bool:
    return False


@dataclasses.dataclass
class _KeepBest:
  """Preservation policy; Orbax's own BestN forgets the metrics at a restart."""

  owner: Checkpoints

  def should_preserve(self, checkpoints, *, context):
    best = self.owner._best_of([info.step for info in checkpoints])
    return [info.step == best for info in checkpoints]


def _items(state) -> dict[str, Any]:
  fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
  items = {'params': fields.pop('params')}
  if (ema := fields.pop('ema')) is not None:
    items['ema'] = ema
  return items | {'train': fields}


def _named(items) -> dict[str, Any]:
  flat = trees.flatten(items)
  assert len(flat) == len(jax.tree.leaves(items)), 'two leaves of one name'
  return flat


def _differences(saved, want) -> list[str]:
  lines = []
  for name in sorted(saved.keys() | want.keys()):
    old = saved.get(name)
    old = f'{old[0]} {old[1]}' if old else 'no such leaf'
    new = want.get(name)
    new = f'{tuple(new.shape)} {new.dtype}' if new is not None else 'no such leaf'
    if old != new:
      lines.append(f'{name} (saved: {old}, now: {new})')
  return lines


def _versions() -> dict[str, str]:
  versions = {'python': '.'.join(map(str, sys.version_info[:3]))}
  for package in ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy'):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  return versions


def _sha256(body) -> str:
  # Twice through JSON: tuples become lists, keys strings, as they will be when read.
  body = json.loads(json.dumps(body))
  return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _and_more(names, shown: int = 1) -> str:
  more = f' and {len(names) - shown} more' if len(names) > shown else ''
  return '; '.join(names[:shown]) + more


def _say(line: str):
  if jax.process_index() == 0:
    print(line, file=sys.stderr, flush=True)


def _from_first(value: int) -> int:
  if jax.process_count() == 1:
    return value
  return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def _all(ok: bool) -> bool:
  if jax.process_count() == 1:
    return ok
  return bool(np.all(multihost_utils.process_allgather(np.int32(ok))))


@contextlib.contextmanager
def _together():
  # Damage that one process meets is damage for all: they take the same next step.
  damage = None
  try:
    yield
  except _Damaged as error:
    damage = error
  if not _all(damage is None):
    raise damage or _Damaged('another process could not read it')


@contextlib.contextmanager
def _quiet():
  # A failed read leaves coroutines behind, which Python reports one by one, and reads
  # that come back when nobody waits for them any more.
  hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
  try:
    yield
  except Exception:
    gc.collect()
    hook = hook if isinstance(hook, _LateReads) else _LateReads(hook)
    raise
  finally:
    sys.unraisablehook = hook


@dataclasses.dataclass
class _LateReads:
  hook: Callable

  def __call__(self, unraisable):
    if str(unraisable.exc_value) != 'Event loop is closed':
      self.hook(unraisable)


# Orbax logs pages of tracebacks from its threads, and raises the same errors to us;
# its warnings are about its own waiting.
logging.getLogger('absl').addFilter(
  lambda record: record.levelno < logging.WARNING or '/orbax/' not in record.pathname
)
