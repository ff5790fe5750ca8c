"""predictions.npz: the outputs of a model for each example of an evaluation.

One file holds the latest predictions of every evaluation of a run. For the evaluation 'test'
it has the number `test/step` and, if the outputs are classes, arrays over n examples in the
order of the split:

  test/index        int32 [n]          the example's position in the split
  test/label        int32 [n]          its class; -1 if it has several
  test/top          int32 [n, k]       the k = min(5, K) classes with the largest logits
  test/probability  float32 [n, k]     their probabilities, by softmax or sigmoid as the loss
  test/right        bool [n, k]        whether each of them is a label of the example

Classes have the model's numbers, even if the data has other numbers for them. Images that
could not be read are left out.
"""

import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import files
from vit_jax.errors import UserError

FILE = 'predictions.npz'
# Maximum number of examples that are stored, which take 5 MB. Of a larger split, only every
# second (or third, and so on) example is stored, so that all classes occur even if the split
# is sorted by class.
MOST = 100_000
_ARRAYS = ('index', 'label', 'top', 'probability', 'right')


def make_rows(batch: dict, logits, targets, counted, binary: bool) -> dict:
  """Makes the rows of a batch inside jit: {name: array [B] or [B, k]}, and 'counted'.

  Args:
    logits: float32 [B, K].
    targets: bool [B, K], which classes are labels.
    counted: bool [B]; False for padding and for images without a label.
    binary: whether probabilities are those of independent classes.
  """
  values, top = jax.lax.top_k(logits, min(5, logits.shape[-1]))
  if binary:
    probability = jax.nn.sigmoid(values)
  else:
    probability = jnp.exp(values - jax.nn.logsumexp(logits, -1, keepdims=True))
  return {
    'index': batch['index'],
    'label': jnp.where(targets.sum(-1) == 1, targets.argmax(-1), -1),
    'top': top,
    'probability': probability,
    'right': jnp.take_along_axis(targets, top, axis=-1),
    'counted': counted,
  }


class Collector:
  """Collects the rows of an evaluation, at most MOST."""

  def __init__(self, num_examples: int):
    self._stride = -(-num_examples // MOST)
    self._parts: list[dict] = []

  def add(self, rows: dict) -> None:
    """Adds the rows of a batch, from `make_rows`, as NumPy arrays."""
    chosen = rows['counted'] & (rows['index'] % self._stride == 0)
    self._parts.append({key: rows[key][chosen] for key in _ARRAYS})

  def result(self) -> dict[str, np.ndarray]:
    """Returns the rows in the order of the split: {name: array}."""
    parts = self._parts
    joined = {key: np.concatenate([part[key] for part in parts]) for key in _ARRAYS}
    order = np.argsort(joined['index'], kind='stable')
    return {key: value[order] for key, value in joined.items()}


def pack(evaluations: dict[str, dict]) -> bytes:
  """Returns the bytes of the file, given {name of an evaluation: its arrays}."""
  file = io.BytesIO()
  np.savez_compressed(
    file,
    **{f'{name}/{k}': x for name, rows in evaluations.items() for k, x in rows.items()},
  )
  return file.getvalue()


def read(folder: str | Path) -> dict[str, dict[str, np.ndarray]]:
  """Reads {name of an evaluation: {'step', 'index', 'label', ...}}; {} if there is no file."""
  path, evaluations = files.path(folder) / FILE, {}
  if not path.is_file():
    return {}
  try:
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
      for key in file.files:
        name, _, array = key.rpartition('/')
        evaluations.setdefault(name, {})[array] = file[key]
  except files.DAMAGED as e:
    raise UserError(
      f'{path} is damaged ({e}): vit_jax evaluate writes it anew.'
    ) from None
  return evaluations
