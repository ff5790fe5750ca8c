"""Small pictures of the most confident mistakes."""

import base64
import contextlib
import dataclasses
import io
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit_jax.data import single_image, sources
from vit_jax.errors import BadImage, RunError
from vit_jax.tools.report.folder import Run

SIDE = 160  # pixels of the longer side, at most
_CHUNK = 32  # examples that are read in one go


class Examples:
  """The examples of one evaluation, read again."""

  def __init__(self, data: dict):
    """Opens the source.

    Args:
      data: the evaluation's section `data`.

    Raises:
      UserError: for data that is no longer there.
    """
    options = data.get('source_options') or {}
    self.source = sources.build(
      data['source'], data['split'], classes=data.get('classes'), **options
    )
    self.pp = data['pp']

  def read(self, indices: Iterable[int]) -> Iterator[tuple[int, bytes | np.ndarray]]:
    """Yields (index, image), encoded or uint8 [H, W, C], of those that can be read."""
    indices = [i for i in indices if i < len(self.source)]
    for start in range(0, len(indices), _CHUNK):
      chunk = indices[start : start + _CHUNK]
      for i, example in zip(chunk, self.source.read(np.array(chunk)), strict=True):
        if 'error' not in example:
          yield i, example['image']

  def preprocessed(self, image) -> np.ndarray:
    """Returns an image as the model sees it, for a person: uint8 [H, W, C].

    Raises:
      BadImage: for an image that cannot be read.
      UserError: for a pipeline that does not work on a single image.
    """
    # Pipelines end in different ranges: an image outside of [-1, 1] is scaled by its own.
    x = single_image.SingleImage(self.pipeline(image))(image)
    low, high = (-1.0, 1.0) if np.abs(x).max() <= 1 else (x.min(), x.max())
    return _levels(x, low, high)

  def pipeline(self, image) -> str:
    """Returns the pipeline, with `decode` in front where an encoded image needs it."""
    if isinstance(image, np.ndarray) or re.match(r'\s*decode\b', self.pp):
      return self.pp
    return f'decode|{self.pp}'


def _levels(x: np.ndarray, low: float, high: float) -> np.ndarray:
  return np.uint8((x - low) / max(high - low, 1e-6) * 255 + 0.5)


def data_url(x: np.ndarray) -> str:
  """Returns an image as a JPEG in a data URL.

  Args:
    x: uint8 [H, W, 1 or 3]. A small image stays as it is, and the page enlarges it.
  """
  image = Image.fromarray(x[..., 0] if x.shape[-1] == 1 else x)
  image.thumbnail((SIDE, SIDE))
  file = io.BytesIO()
  image.save(file, 'JPEG', quality=75)
  return _url('jpeg', file)


def overlay(attention: np.ndarray) -> str:
  """Returns attention [h, w] as a small transparent PNG in a data URL.

  It is dark without attention, and transparent where there is most.
  """
  x = attention / max(float(attention.max()), 1e-12)
  pixels = np.zeros((*x.shape, 4), np.uint8)
  pixels[..., 3] = np.uint8((1 - x) * 215)
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, 'PNG')
  return _url('png', file)


def _url(kind: str, file: io.BytesIO) -> str:
  return f'data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}'


class Mistake(NamedTuple):
  """An example that was classified wrongly.

  Attributes:
    name: a path where the example has one.
    label: its class; -1 if it has several.
    top, probability: the most probable classes, the first one first.
    picture: a data URL; None if the image could not be read.
    attention: a data URL of the overlay for the picture, or None.
  """

  name: str
  label: int
  top: list[int]
  probability: list[float]
  picture: str | None
  attention: str | None


def most_confident(answers: dict, most: int) -> np.ndarray:
  """Returns the rows of the wrong answers of highest probability, int [<= most].

  Args:
    answers: 'right' [n, k], 'probability' [n, k], see `evaluators.predictions`.
  """
  wrong = np.flatnonzero(~answers['right'][:, 0])
  wrong = wrong[np.isfinite(answers['probability'][wrong, 0])]
  return wrong[np.argsort(-answers['probability'][wrong, 0], kind='stable')][:most]


def mistakes(
  run: Run, name: str, examples: Examples | None, most: int, attention: bool
) -> tuple[list[Mistake], str]:
  """Returns (the most confident mistakes of an evaluation, why they are incomplete or '').

  Args:
    examples: its images; None if they can no longer be read.
    attention: whether to map where the model looked, which reads a checkpoint and
      compiles the model.
  """
  answers = run.predictions[name]
  rows = most_confident(answers, most)
  indices = [int(answers['index'][row]) for row in rows]
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
      examples.source.name_of(i) if i in images else f'{name} #{i}',
      int(answers['label'][row]),
      answers['top'][row].tolist(),
      answers['probability'][row].tolist(),
      data_url(shown[i]) if i in shown else None,
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
  return {i: overlay(m) for i, m in zip(images, maps, strict=True)}
