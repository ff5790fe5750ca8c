"""The mistakes that a model was most confident of, and where it looked."""

import contextlib
import dataclasses
from typing import NamedTuple

import numpy as np

from vit_jax.data.ops.decode import BadImage
from vit_jax.errors import RunError
from vit_jax.tools.report import pictures
from vit_jax.tools.report.folder import Run


class Mistake(NamedTuple):
  """An example that was classified wrongly.

  Attributes:
    index: its position in the split.
    name: by which a person finds it: a path where it has one.
    label: its class, -1 where it has several.
    top, probability: the likeliest classes, the first first.
    picture: a data URL, None if it could not be read.
    attention: a data URL of the same shape to lay over it, None without.
  """

  index: int
  name: str
  label: int
  top: list[int]
  probability: list[float]
  picture: str | None
  attention: str | None


def most_confident(found: dict, most: int) -> np.ndarray:
  """Returns the rows of the wrong answers of highest probability, int [at most most].

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
  """Returns (mistakes of an evaluation, why something of them is missing or '').

  Args:
    name: of the evaluation.
    examples: its images; None: they cannot be read any more.
    most: how many mistakes.
    attention: map it, which takes the model and a compilation.
  """
  found = run.predictions[name]
  rows = most_confident(found, most)
  indices = [int(found['index'][row]) for row in rows]
  images: dict = {}
  if examples:
    with contextlib.suppress(RunError, OSError):  # out of reach: without pictures
      images = dict(examples.read(indices))
  shown: dict[int, np.ndarray] = {}
  for i, image in images.items():
    with contextlib.suppress(BadImage, RunError):
      shown[i] = examples.preprocessed(image)
  maps, why = {}, ''
  if attention and shown:
    try:
      maps = _attention(run, name, examples, {i: images[i] for i in shown})
    except (RunError, RuntimeError) as error:  # JAX's too: there is not enough memory
      why = f'where the model looked. {str(error).splitlines()[0]}'
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
    RunError: for a model without attention, or a step that is not kept.
  """
  from vit_jax import explain, pretrained

  step = int(run.predictions[name]['step'])
  ema = run.evals[name].get('use_ema', False)
  loaded = pretrained.load(f'{run.path}@{step}', ema=ema)
  some = next(iter(images.values()))
  loaded = dataclasses.replace(loaded, pp=examples.pipeline(some))
  # One image at a time: all weights of a large model's layers fill the memory.
  maps = explain.attention_maps(loaded, list(images.values()), batch_size=1)
  return {i: pictures.overlay(m) for i, m in zip(images, maps, strict=True)}
