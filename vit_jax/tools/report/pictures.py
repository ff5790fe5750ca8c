"""Small pictures of the most confident mistakes."""

import base64
import contextlib
import io
import re

import numpy as np
from PIL import Image

from vit_jax.data import single_image, sources
from vit_jax.errors import BadImage, RunError
from vit_jax.tools.report.folder import Run

SIDE = 160  # pixels of the longer side, at most


def most_confident(answers: dict, most: int) -> np.ndarray:
  """Returns the rows of the wrong answers of highest probability, int [<= most].

  Args:
    answers: 'right' [n, k], 'probability' [n, k], see `evaluators.predictions`.
  """
  wrong = np.flatnonzero(~answers['right'][:, 0])
  wrong = wrong[np.isfinite(answers['probability'][wrong, 0])]
  return wrong[np.argsort(-answers['probability'][wrong, 0], kind='stable')][:most]


def mistakes(run: Run, name: str, most: int) -> tuple[list[dict], str]:
  """Returns (the most confident mistakes of an evaluation, why pictures lack or '').

  A mistake is {name, a path where the example has one; label, -1 for several; top, (class,
  probability) of the most probable classes; picture, a data URL, or None if unreadable}.
  """
  answers, why, examples = run.predictions[name], '', {}
  rows = most_confident(answers, most)
  indices = [int(answers['index'][row]) for row in rows]
  try:
    examples = _examples(run.evals.get(name, {}).get('data'), indices)
  except (RunError, OSError) as error:  # the data is gone, or out of reach
    why = f'{name}: pictures. {error}'
  mistakes = []
  for row, i in zip(rows, indices, strict=True):
    top = zip(answers['top'][row], answers['probability'][row], strict=True)
    top = [(int(k), float(p)) for k, p in top]
    title, picture = examples.get(i, (f'{name} #{i}', None))
    label = int(answers['label'][row])
    mistakes.append({'name': title, 'label': label, 'top': top, 'picture': picture})
  return mistakes, why


def _examples(data: dict | None, indices: list[int]) -> dict[int, tuple]:
  """Returns {index: (name, data URL of the image as the model sees it)}, read again.

  Args:
    data: the evaluation's section `data`; None if the config has none of its name.
  """
  if data is None:
    raise RunError('config.json has no evaluation of this name.')
  options = data.get('source_options') or {}
  classes = data.get('classes')
  source = sources.build(data['source'], data['split'], classes=classes, **options)
  indices, pictures = [i for i in indices if i < len(source)], {}
  for i, example in zip(indices, source.read(np.array(indices, int)), strict=True):
    with contextlib.suppress(BadImage):
      if 'error' not in example:
        pictures[i] = source.name_of(i), picture(example['image'], data['pp'])
  return pictures


def picture(image, pp: str) -> str:
  """Returns a preprocessed image as a JPEG in a data URL."""
  if not isinstance(image, np.ndarray) and not re.match(r'\s*decode\b', pp):
    pp = f'decode|{pp}'
  x = single_image.SingleImage(pp)(image)
  # Pipelines end in different ranges: an image outside of [-1, 1] is scaled by its own.
  low, high = (-1.0, 1.0) if np.abs(x).max() <= 1 else (x.min(), x.max())
  x = np.uint8((x - low) / max(high - low, 1e-6) * 255 + 0.5)
  small = Image.fromarray(x[..., 0] if x.shape[-1] == 1 else x)
  small.thumbnail((SIDE, SIDE))
  file = io.BytesIO()
  small.save(file, 'JPEG', quality=75)
  return f'data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}'
