"""The mistakes that a model was most confident of, and where it looked."""

import contextlib
import dataclasses
from typing import NamedTuple

import numpy as np

from vit_jax.errors import BadImage, RunError
from vit_jax.tools.report import pictures
from vit_jax.tools.report.folder import Run


class Mistake(NamedTuple):
  """An example that was classified wrongly.

  Attributes:
    index: its position in the split.
    name: what a person finds it by, a path where it has one.
    label: its class; -1 if it has several.
    top, probability: the most probable classes, the first one first.
    picture: a data URL; None if the image could not be read.
    attention: a data URL of the overlay for the picture; None without.
  """

  index: int
  name: str
  label: int
  top: list[int]
  probability: list[float]
  picture: str | None
  attention: str | None


def most_confident(found: dict, most: int) -> np.ndarray:
  """Returns the rows of the wrong answers of highest probability, int [<= most].

  Args:
    found: 'right' [n, k], 'probability' [n, k], see `evaluators.predictions`.
  """
  wrong = np.flatnonzero(~found['right'][:, 0])
  confidence = found['probability'][wrong, 0]
  wrong = wrong[np.isfinite(confidence)]
  return wrong[np.argsort(-found['probability'][wrong, 0], kind='stable')][:most]


def describe(
  run: Run,
  name: str,
  examples: pictures.Examples | None,
  most: int,
  attention: bool,
) -> tuple[list[Mistake], str]:
  """Returns (mistakes of an evaluation, what they lack and why, or '').

  Args:
    name: of the evaluation.
    examples: its images; None if they can no longer be read.
    most: how many mistakes.
    attention: whether to map where the model looked.
  """
  found = run.predictions[name]
  rows = most_confident(found, most)
  indices = [int(found['index'][row]) for row in rows]
  images, shown, maps, why = {}, {}, {}, ''
  try:
    images = dict(examples.read(indices)) if examples else {}
    for i, image in images.items():
      with contextlib.suppress(BadImage):  # one without a picture
        shown[i] = examples.preprocessed(image)
  except (RunError, OSError) as error:
    why = f'pictures of mistakes. {error}'
  if attention and shown:
    try:
      maps = _attention(run, name, examples, {i: images[i] for i in shown})
    except (RunError, RuntimeError) as error:  # JAX's too: there is not enough memory
      reason = str(error) or type(error).__name__
      why = f'where the model looked. {reason.splitlines()[0]}'
  return [
    Mistake(
      i,
      examples.source.name_of(i) if i in images else f'{name} #{i}',
      int(found['label'][row]),
      found['top'][row].tolist(),
      found['probability'][row].tolist(),
      pictures.data_url(shown[i], pictures.LARGE) if i in shown else None,
      maps.get(i),
    )
    for row, i in zip(rows, indices, strict=True)
  ], why


def _attention(run: Run, name: str, examples, images: dict) -> dict[int, str]:
  """Returns {index: data URL of where the model looked}.

  Raises:
    RunError: for a model without attention, or a step whose checkpoint is gone.
  """
  from vit_jax import explain, weights

  step = int(run.predictions[name]['step'])
  ema = run.evals[name].get('use_ema', False)
  loaded = weights.load(f'{run.path}@{step}', ema=ema)
  some = next(iter(images.values()))
  loaded = dataclasses.replace(loaded, pp=examples.pipeline(some))
  # One image at a time: all weights of a large model's layers fill the memory.
  maps = explain.attention_maps(loaded, list(images.values()), batch_size=1)
  return {i: pictures.overlay(m) for i, m in zip(images, maps, strict=True)}
