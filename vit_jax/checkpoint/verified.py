"""Reads one step of a run, and checks every bit of it."""

import re

import jax

from vit_jax import trees
from vit_jax.checkpoint import manifest
from vit_jax.checkpoint.fingerprint import fingerprints
from vit_jax.checkpoint.manifest import Damaged, and_more
from vit_jax.checkpoint.storage import Storage, together
from vit_jax.errors import UserError


def read_body(storage: Storage, step: int) -> dict:
  """Returns the body of a step's manifest; raises `Damaged`."""
  return manifest.unsealed(storage.read_meta(step), step)


def check(storage: Storage, body: dict, items: dict, frozen: dict) -> None:
  """Refuses what `read` would of a state, by a manifest alone; reads no arrays.

  Args:
    body: of the step's manifest. items, with 'train', and frozen: see `read`.

  Raises:
    UserError: as `read`.
  """
  step, leaves, want = body['step'], body['leaves'], manifest.named(items)
  _check_leaves(storage, step, leaves, want)
  _frozen_leaves(storage, step, leaves, _placed(want), frozen)


def read(storage: Storage, step: int, items: dict, frozen: dict) -> tuple[dict, dict]:
  """Returns `(items, body)`: the arrays of a step, and the body of its manifest.

  Args:
    items: {item: tree of `jax.ShapeDtypeStruct`}. Without the item 'train' the first is a
      tree of parameters, of which those that the run did not train come back as the item
      'frozen'. A leaf without sharding goes to one device.
    frozen: name -> array, at least of the parameters that the run did not train.

  Raises:
    Damaged: what was stored differs from what was saved.
    UserError: names, shapes or dtypes differ from `items`, or bits of `frozen` from those
      of the run.
  """
  with together():
    body = read_body(storage, step)
  leaves = body['leaves']
  if 'train' not in items:  # not a state, but its parameters: trained, and frozen
    item = next(iter(items))
    names = '|'.join(map(re.escape, manifest.frozen_names(leaves)))
    kept, trained = trees.partition(items[item], [(names, True), ('.*', False)])
    items = {**items, item: trained} | ({'frozen': kept} if kept else {})
    leaves = {n: leaf for n, leaf in leaves.items() if n.split('/')[0] in items}
  want = manifest.named(items)
  _check_leaves(storage, step, leaves, want)
  placed = _placed(want)
  given = _frozen_leaves(storage, step, leaves, placed, frozen)
  stored = {name: x for name, x in placed.items() if not manifest.is_frozen(name)}
  with together():
    flat = trees.flatten(storage.read(step, trees.unflatten(stored)))
  prints = fingerprints(flat)
  wrong = [name for name in stored if prints.get(name) != leaves[name][2]]
  if wrong:
    raise Damaged(f'checksum mismatch in {and_more(wrong)}')
  found = [(flat | given)[name] for name in want]
  return jax.tree.unflatten(jax.tree.structure(items), found), body


def _check_leaves(storage, step, leaves, want) -> None:
  if wrong := manifest.differences(leaves, want):
    raise UserError(
      f'Checkpoint step {step} in {storage.directory} was saved with a different '
      f'configuration: {and_more(wrong, 3)}. Use the config that wrote it, or another '
      'workdir.'
    )


def _placed(want: dict) -> dict:
  one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or one)
    for name, x in want.items()
  }


def _frozen_leaves(storage, step, leaves, placed, frozen) -> dict:
  given = {}
  for name, x in placed.items():
    value = frozen.get(name.partition('/')[2]) if manifest.is_frozen(name) else None
    if value is not None and (value.shape, value.dtype) == (x.shape, x.dtype):
      given[name] = jax.device_put(value, x.sharding)
  prints = fingerprints(given)
  wrong = [n for n in placed if manifest.is_frozen(n) and prints.get(n) != leaves[n][2]]
  if wrong:
    raise UserError(
      f'Checkpoint step {step} in {storage.directory} holds what was trained on top of '
      f'frozen parameters, and those of config.weights.source differ: '
      f'{and_more(wrong)}. Give the weights that the run started from: '
      'config.weights.source, or weights= (--weights) where the run is loaded.'
    )
  return given
