"""Verified checkpoints: a fingerprint per leaf, and a fallback to older steps.

A step is a folder, `<directory>/<step>`, with the items `params`, `ema` and `batch_stats`
(if the state has them), `train` (all other fields of the state) and `meta`. Orbax, which
writes and reads them (see `storage`), does not notice flipped bits or a changed dtype, and
does not fall back to an older step. This module does.

`meta` is JSON with a checksum, `{'sha256', 'body'}`. The body, called the manifest, holds
`step`, `leaves` ({name: [shape, dtype, fingerprint]}), `metrics`, and `meta`, the caller's
dict. Leaves are named by their paths, so that no container type of an optimizer is part of
the format.

Frozen parameters are described in the manifest and not stored. Whoever restores a state reads
them again from the weights that the run started from, and passes them here. An error is
raised unless every bit is as it was. To read the parameters of any run:

  saved = Checkpoints(folder)
  frozen = read_weights() if saved.list_frozen() else {}  # {name: array}, maybe of more
  variables, meta = saved.restore_variables({'params': abstract_params}, frozen=frozen)

Several processes: every call is collective, process 0 decides. The step folders lie on
a file system that all of them share, or in a bucket.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from vit_jax import distributed, files, trees
from vit_jax.check import Count, Period
from vit_jax.checkpoint.fingerprint import fingerprints, survey
from vit_jax.checkpoint.storage import Damaged, Storage, together
from vit_jax.errors import NoUsableCheckpoint, Unreachable, UserError

# Prefix of frozen leaves. The manifest describes them, but they are not stored.
FROZEN = 'frozen/'


class Checkpoints(Storage):
  """The checkpoints of one run. Call `close` at the end, also after an error.

  Args:
    directory: a folder on a disk or mount, or gs://BUCKET/PATH; made at the first save.
    every: steps between two saves. It is only stored here: the caller decides when to save.
    keep_latest: number of newest steps to keep. With 2 or more, an older one remains if the
      newest is damaged.
    keep_every: multiples of this number of steps are kept for good; None: no such steps.
    best: name of a metric. The step with its best value is kept. A step that was saved
      without that metric, or with a non-finite one, is never the best.
    larger_is_better: whether larger values of that metric are better.

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
    path = files.path(directory)
    path = path if files.is_url(path) else path.absolute()
    super().__init__(path, keep_latest, keep_every, self._best)
    self.every, self.best = every, best
    self._sign = 1 if larger_is_better else -1
    # {step: score}, where larger is better; None until the metrics are read.
    self._scores: dict[int, float] | None = None

  def latest(self) -> int | None:
    """Returns the newest complete step, or None."""
    return max(self.steps(), default=None)

  def best_step(self) -> int | None:
    """Returns the complete step where the metric `best` was best, or None."""
    return self._best(self.steps())

  def _best(self, steps: Sequence[int]) -> int | None:
    """Returns the step of `steps` with the best finite metric; of equal ones, the last."""
    if self._scores is None:
      # Read the metrics of the steps that were saved before the run was resumed.
      self._scores = {}
      for step in self.steps() if self.best else ():
        with contextlib.suppress(Damaged):
          self._score(self.manifest(step))
    scores = [(self._scores[step], step) for step in steps if step in self._scores]
    return max(scores)[1] if scores else None

  def _score(self, body: dict) -> None:
    value = body['metrics'].get(self.best, math.nan)
    if math.isfinite(value):
      self._scores[body['step']] = self._sign * value

  # -- saving -----------------------------------------------------------------------

  def save(self, state, meta: dict, metrics: dict | None = None) -> bool:
    """Starts to save `state` and returns; its buffers may be donated at once.

    Blocks until `state` is computed, fingerprinted and copied to the host, and the
    previous save is complete. Evaluate first: a saved step's metrics never change.

    Args:
      state: a dataclass pytree with the fields `step` (integer scalar), `params`,
        `frozen` (nested dicts like params, not stored), `ema` (a tree like params, or
        None), `batch_stats` (nested dicts, may be empty) and any others.
      meta: a JSON-serialisable dict, which `restore` returns (with lists for tuples).
      metrics: {name: number}, see `best`.

    Returns:
      True if this step is on disk, or will be once the save completes. False if the state
      holds a non-finite number: it is reported on stderr and not saved, so that it cannot
      replace a good one.

    Raises:
      DiskFull: if the disk is full now, or was full during the previous save. Older steps
        are intact.
    """
    flat = _flatten_items(_items(state))
    prints, bad = survey(flat)
    step = int(state.step)
    if poisoned := [name for name in flat if bad[name]]:
      distributed.say(
        f'checkpoint step {step} not saved: {bad[poisoned[0]]} non-finite numbers in '
        f'{_and_more(poisoned)}'
      )
      return False
    self.wait()
    if distributed.broadcast_first(step in self.steps()):
      return True
    body = {
      'step': step,
      'meta': meta,
      'leaves': {n: [list(x.shape), str(x.dtype), prints[n]] for n, x in flat.items()},
      'metrics': {name: float(value) for name, value in (metrics or {}).items()},
    }
    sealed = {'sha256': _sha256(body), 'body': body}
    # This reads the metrics of older steps.
    self._best(())
    self._score(body)
    stored = {name: x for name, x in flat.items() if not name.startswith(FROZEN)}
    self.write(step, trees.unflatten(stored), sealed)
    return True

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    """Closes the storage. After an outage, does not wait for a save to the bucket."""
    if kind and issubclass(kind, Unreachable) and files.is_url(self.directory):
      self.abandon()
    else:
      self.close()

  # -- restoring --------------------------------------------------------------------

  def restore(self, abstract, frozen: dict | None = None) -> tuple[Any, dict] | None:
    """Returns `(state, meta)` of the newest step that is bit for bit as it was saved.

    A damaged step is reported in one line on stderr. Once an older one has been restored,
    the damaged step is renamed to `<step>.corrupt`. Nothing is ever deleted.

    Args:
      abstract: the state, whose leaves are `jax.ShapeDtypeStruct` with the shardings to
        restore to. The mesh may differ from that of the run that saved.
      frozen: {name: array} of the parameters in `abstract.frozen`; it may hold more.

    Returns:
      `(state, meta)`, or None if no step was ever completed here.

    Raises:
      UserError: if the saved names, shapes or dtypes differ from `abstract`, because the run
        had another config, or if bits of `frozen` differ. Nothing is renamed.
      NoUsableCheckpoint: if all checkpoints are damaged. They keep their names, so that the
        next start reports the same instead of starting over.
    """
    loaded = self._load(_items(abstract), frozen or {})
    if loaded is None:
      return None
    items, body, damaged = loaded
    for step, why in damaged.items():
      distributed.say(
        f'checkpoint step {step} is damaged ({why}); set aside as '
        f'{self.set_aside(step)}; using step {body["step"]}'
      )
    train = items.pop('train')
    return dataclasses.replace(abstract, **items, **train), body['meta']

  def check_structure(self, abstract, frozen: dict | None = None) -> None:
    """Raises the UserError that `restore` would raise, without reading arrays.

    It compares the structure of the state, and the bits of the frozen parameters. It does
    not find damage.
    """
    bound = math.inf
    while (bound := self._newest_below(bound)) >= 0:
      # A damaged step is skipped here, because `restore` reports it.
      with contextlib.suppress(Damaged):
        body, named = self.manifest(bound), _flatten_items(_items(abstract))
        self._check_leaves(body, body['leaves'], named)
        self._check_frozen(body, _add_shardings(named), frozen or {})
        return

  def restore_variables(
    self,
    abstract: dict,
    *,
    frozen: dict | None = None,
    ema: bool = False,
    step: int | str | None = None,
  ) -> tuple[dict, dict]:
    """Returns `(variables, meta)`, without reading the optimizer or anything else.

    It writes nothing, so it is safe in the folder of a run in progress.

    Args:
      abstract: {'params': ...} and maybe 'batch_stats', nested dicts of
        `jax.ShapeDtypeStruct`, see `restore`. A leaf without sharding goes to one device.
        Parameters that `list_frozen()` names may be left out, and are then not returned.
      frozen: {name: array} of the parameters that `list_frozen()` names; it may hold more.
      ema: whether to return the averaged parameters instead of the last ones.
      step: a step, 'best' (see `best`), or None for the newest step that is not damaged.

    Raises:
      UserError: if there is no such step or no EMA, or if the structure differs from
        `abstract` or bits from `frozen`.
      NoUsableCheckpoint: if the step is damaged.
    """
    item = 'ema' if ema else 'params'
    stats = {trees.STATS: x} if (x := abstract.get(trees.STATS)) else {}
    items = {item: abstract['params'], **stats}
    if ema:
      # The EMA averages the batch statistics too, so they are part of its item.
      items = {item: abstract['params'] | stats}
    items, body, damaged = self._load(items, frozen or {}, self._find(step))
    for bad, why in damaged.items():
      distributed.say(
        f'checkpoint step {bad} is damaged ({why}); using step {body["step"]}'
      )
    params = trees.combine(items.pop(item), items.pop('frozen', {}))
    if ema and stats:
      items[trees.STATS] = params.pop(trees.STATS)
    return {'params': params, **items}, body['meta']

  def list_frozen(self, step: int | str | None = None) -> list[str]:
    """Returns the names of the parameters that the run did not train.

    Raises the same errors as `meta`.
    """
    return _strip_frozen(self._body(step)['leaves'])

  def meta(self, step: int | str | None = None) -> dict:
    """Returns the dict that was saved with `step`, or with the newest readable step if None.

    Raises the same errors as `restore_variables`.
    """
    return self._body(step)['meta']

  def manifest(self, step: int) -> dict:
    """Returns the manifest of a step; the module's docstring describes it.

    Raises:
      Damaged: if it is not as it was saved, or belongs to another step.
    """
    sealed = self.read(step)['meta']
    try:
      body, expected = sealed['body'], sealed['sha256']
    except (TypeError, KeyError):
      raise Damaged('meta is incomplete') from None
    if _sha256(body) != expected:
      raise Damaged('checksum mismatch in meta')
    if body['step'] != step:
      raise Damaged(f'its meta belongs to step {body["step"]}')
    return body

  def _body(self, step) -> dict:
    step = self._find(step)
    for candidate in reversed(self.steps()) if step is None else [step]:
      with contextlib.suppress(Damaged):
        return self.manifest(candidate)
    raise NoUsableCheckpoint(f'No checkpoint in {self.directory} has readable meta.')

  def _find(self, step) -> int | None:
    steps = self.steps()
    if step == 'best':
      step = self._best(steps)
      if step is None:
        raise UserError(
          f"No step in {self.directory} has a finite metric {self.best!r}, so step='best' "
          'cannot be restored: name another metric with Checkpoints(best=...).'
        )
    elif not steps or (step is not None and step not in steps):
      raise UserError(
        f'No checkpoint {"" if step is None else f"step {step} "}in {self.directory}; '
        f'steps there: {steps or "none"}.'
      )
    return step

  def _load(self, items, frozen: dict, step: int | None = None):
    """Loads `step`, or the newest intact step if None.

    Returns:
      (items, manifest, {damaged step: reason}), or None if no step was ever completed.
    """
    damaged = {}
    bound = math.inf if step is None else step + 1
    while (bound := self._newest_below(bound)) >= 0:
      try:
        return *self._read(bound, items, frozen), damaged
      except Damaged as error:
        damaged[bound] = str(error)
      if step is not None:
        break
    aside = sorted(path.name for path in self.directory.glob('*.corrupt*'))
    if not damaged and not aside:
      return None
    reasons = [f'step {s}: {why}' for s, why in damaged.items()] or aside
    raise NoUsableCheckpoint(
      f'No checkpoint in {self.directory} can be restored; damaged: '
      f'{"; ".join(reasons)}. Nothing was deleted or renamed. Bring back a good copy, '
      'or move that folder away or choose another workdir to start from the beginning.'
    )

  def _newest_below(self, bound) -> int:
    below = (step for step in self.steps() if step < bound)
    return distributed.broadcast_first(max(below, default=-1))

  def _read(self, step: int, items: dict, frozen: dict) -> tuple[dict, dict]:
    """Reads the arrays of a step, checks every bit, and returns `(items, manifest)`.

    Args:
      items: {item: tree of `jax.ShapeDtypeStruct`}. If there is no item 'train', the first
        item is a tree of all parameters. The result then has an item 'frozen' with the
        parameters that the run did not train.
      frozen: {name: array} of the parameters that the run did not train; it may hold more.

    Raises:
      Damaged: if the arrays differ from those that were saved.
      UserError: if names, shapes or dtypes differ from `items`, or bits of `frozen` from
        those of the run.
    """
    with together():
      body = self.manifest(step)
    leaves = body['leaves']
    if 'train' not in items:
      # `items` has all parameters of a model, some of which may be frozen in the run.
      item = next(iter(items))
      names = '|'.join(map(re.escape, _strip_frozen(leaves)))
      untrained, trained = trees.partition(items[item], [(names, True), ('.*', False)])
      items = {**items, item: trained} | ({'frozen': untrained} if untrained else {})
      chosen = {f'{FROZEN}{name}' for name in trees.flatten(untrained)}
      leaves = {
        n: leaf
        for n, leaf in leaves.items()
        if (n in chosen if n.startswith(FROZEN) else n.split('/')[0] in items)
      }
    named = _flatten_items(items)
    self._check_leaves(body, leaves, named)
    placed = _add_shardings(named)
    described = self._check_frozen(body, placed, frozen)
    stored = {name: x for name, x in placed.items() if not name.startswith(FROZEN)}
    with together():
      flat = trees.flatten(self.read(step, trees.unflatten(stored)))
    prints = fingerprints(flat)
    if wrong := [name for name in stored if prints.get(name) != leaves[name][2]]:
      raise Damaged(f'checksum mismatch in {_and_more(wrong)}')
    arrays = [(flat | described)[name] for name in named]
    return jax.tree.unflatten(jax.tree.structure(items), arrays), body

  def _check_leaves(self, body: dict, leaves: dict, named: dict) -> None:
    lines = []
    for name in sorted(leaves.keys() | named.keys()):
      x, old, new = named.get(name), 'absent', 'absent'
      if name in leaves:
        old = f'{tuple(leaves[name][0])} {leaves[name][1]}'
      if x is not None:
        new = f'{tuple(x.shape)} {x.dtype}'
      if old != new:
        lines.append(f'{name} (saved: {old}, now: {new})')
    if lines:
      raise UserError(
        f'Checkpoint step {body["step"]} in {self.directory} was saved with a different '
        f'configuration: {_and_more(lines, 3)}. Use the config that wrote it, or another '
        'workdir.'
      )

  def _check_frozen(self, body: dict, placed: dict, frozen: dict) -> dict:
    """Checks every bit of the frozen leaves of `placed`, and returns them: {name: array}."""
    placed = {name: x for name, x in placed.items() if name.startswith(FROZEN)}
    arrays = {}
    for name, x in placed.items():
      value = frozen.get(name.removeprefix(FROZEN))
      if value is not None and (value.shape, value.dtype) == (x.shape, x.dtype):
        arrays[name] = jax.device_put(value, x.sharding)
    prints, leaves = fingerprints(arrays), body['leaves']
    if wrong := [name for name in placed if prints.get(name) != leaves[name][2]]:
      raise UserError(
        f'Checkpoint step {body["step"]} in {self.directory} was trained on top of frozen '
        'parameters, and those of config.weights.source, or of config.task.teacher, differ: '
        f'{_and_more(wrong)}. Give the weights that the run started from: '
        'config.weights.source, or weights= (--weights) where the run is loaded.'
      )
    return arrays


def _items(state) -> dict[str, Any]:
  """Splits a state into items: {'params', 'frozen', 'batch_stats', 'ema', 'train'}."""
  fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
  items = {'params': fields.pop('params'), 'frozen': fields.pop('frozen')}
  items |= {key: x for key in ('batch_stats', 'ema') if (x := fields.pop(key))}
  return items | {'train': fields}


def _flatten_items(items: dict[str, Any]) -> dict[str, Any]:
  """Flattens the trees of items to {'item/a/b': leaf}."""
  flat = trees.flatten(items)
  assert len(flat) == len(jax.tree.leaves(items)), 'two leaves of one name'
  return flat


def _add_shardings(named: dict) -> dict:
  """Places leaves that have no sharding on one device."""
  one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or one)
    for name, x in named.items()
  }


def _strip_frozen(leaves) -> list[str]:
  """Selects the frozen leaves, and returns their names without the prefix."""
  return [name.removeprefix(FROZEN) for name in leaves if name.startswith(FROZEN)]


def _and_more(names: list[str], shown: int = 1) -> str:
  """Formats names as 'a; b and 3 more'."""
  more = f' and {len(names) - shown} more' if len(names) > shown else ''
  return '; '.join(names[:shown]) + more


def _sha256(body) -> str:
  # Convert to JSON and back: that turns tuples into lists and keys into strings, as in a
  # manifest that was read.
  body = json.loads(json.dumps(body))
  return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
