"""One evaluation, analysed for the page."""

import time
from typing import NamedTuple

import numpy as np

from vit_jax.errors import RunError
from vit_jax.evaluators import predictions
from vit_jax.tools.report import calibration, confusion, mistakes, pictures
from vit_jax.tools.report.folder import Run

_EACH = 6  # thumbnails of one confusion


class Effort(NamedTuple):
  """What making a page may cost.

  Attributes:
    room: characters for the thumbnails of one evaluation.
    cells: how many cells of a confusion matrix to draw.
    mistakes: how many mistakes of one evaluation to show.
    until: when to stop making thumbnails, on the clock of `time.monotonic`.
    attention: whether to map where the model looked, which reads a checkpoint and
      compiles the model.
  """

  room: int
  cells: int
  mistakes: int
  until: float = float('inf')
  attention: bool = True


class Evaluation(NamedTuple):
  """One evaluation, analysed.

  Attributes:
    name: in the config.
    step: the training step at which it was made.
    examples: how many examples its predictions hold.
    sampled: whether those are only some of the split's, evenly spaced.
    confusion: None where all examples have several labels.
    calibration: None where no probability is finite.
    mistakes: the most confident ones.
    cells: int [m, 3], the cells of the confusion that are drawn.
    cells_left_out: the number of examples in the other cells.
    thumbnails: data URLs for each of the largest confusions, in their order.
    left_out: a sentence for each thing that is missing, with the reason.
  """

  name: str
  step: int
  examples: int
  sampled: bool
  confusion: confusion.Confusion | None
  calibration: calibration.Calibration | None
  mistakes: list[mistakes.Mistake]
  cells: np.ndarray | None
  cells_left_out: int
  thumbnails: list[list[str]]
  left_out: list[str]


def analyse(run: Run, name: str, effort: Effort) -> Evaluation:
  """Returns the analysis of an evaluation whose predictions are kept.

  Args:
    name: of the evaluation, in `run.predictions`.
  """
  found, left_out = run.predictions[name], []
  answers = found['top'][:, 0]
  K = run.config['model'].get('num_classes') or 0
  counted = confusion.count(found['label'], answers, K)
  examples, thumbnails = None, []
  if 'data' not in run.evals.get(name, {}):
    left_out.append(f'{name}: pictures, as config.json has no evaluation of this name.')
  else:
    try:
      examples = pictures.Examples(run.evals[name]['data'])
      if counted is not None:
        thumbnails, why = _thumbnails(counted, found, examples, effort)
        left_out += [f'{name}: some thumbnails, {why}.'] if why else []
    except (RunError, OSError) as error:  # the data is gone, or out of reach
      examples = None
      left_out.append(f'{name}: pictures. {error}')
  attention = effort.attention and time.monotonic() < effort.until
  wrong, why = mistakes.describe(run, name, examples, effort.mistakes, attention)
  if why:
    left_out.append(f'{name}: {why}')
  elif wrong and not attention:
    left_out.append(
      f'{name}: where the model looked, to save time. vit_jax report {run.path} adds it.'
    )
  n = len(answers)
  return Evaluation(
    name,
    int(found['step']),
    n,
    bool(n and found['index'][-1] >= predictions.MOST),
    counted,
    calibration.measure(found['probability'][:, 0], found['right'][:, 0]),
    wrong,
    *((None, 0) if counted is None else counted.drawn(effort.cells)),
    thumbnails,
    left_out,
  )


def _thumbnails(counted, found, examples, effort) -> tuple[list[list[str]], str]:
  """Returns (the thumbnails of each of the largest confusions, why some are missing)."""
  largest = counted.largest()
  wanted = {(int(true), int(answer)): [] for true, answer, _ in largest}
  wrong = np.flatnonzero(found['label'] != found['top'][:, 0])
  pairs = zip(found['label'][wrong], found['top'][wrong, 0], strict=True)
  for row, pair in zip(wrong, pairs, strict=True):
    if pair in wanted:
      wanted[pair].append(int(found['index'][row]))
  lists = [indices[:_EACH] for indices in wanted.values()]
  # The first of each confusion before the second of any.
  order = [x[place] for place in range(_EACH) for x in lists if len(x) > place]
  urls, why = examples.thumbnails(order, effort.room, effort.until)
  return [[urls[i] for i in indices if i in urls] for indices in lists], why
