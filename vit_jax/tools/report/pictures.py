"""Makes small pictures of examples: the most confident mistakes, and where the model looked."""

import base64
import contextlib
import io
import re

import jax
import numpy as np
from PIL import Image

from vit_jax.data import single_image, sources
from vit_jax.errors import BadImage, RunError
from vit_jax.tools.report.folder import Run


def most_confident(answers: dict, most: int) -> np.ndarray:
  """Returns the rows of the wrong predictions with the highest probability, int [<= most].

  Args:
    answers: 'right' [n, k] and 'probability' [n, k], see `evaluators.predictions`.
  """
  wrong = np.flatnonzero(~answers['right'][:, 0])
  wrong = wrong[np.isfinite(answers['probability'][wrong, 0])]
  return wrong[np.argsort(-answers['probability'][wrong, 0], kind='stable')][:most]


def mistakes(run: Run, name: str, most: int, look: bool) -> tuple[list[dict], list]:
  """Returns (the most confident mistakes of an evaluation, reasons for missing pictures).

  A mistake is a dict with 'name', 'label' (-1 for several labels), 'top' ((class,
  probability) of the most probable classes), 'picture' and 'heat' (data URLs or None).

  Args:
    look: whether to draw the attention of the run's newest parameters as 'heat'.
  """
  answers, heats, out = run.predictions[name], {}, []
  rows = most_confident(answers, most)
  examples, why = read(run, name, answers['index'][rows])
  if look and examples:
    try:
      heats = _heats(run, name, examples)
    except (RunError, OSError, RuntimeError, ImportError, ValueError) as error:
      why = [f'{name}: where the model looked. {error}']
  for row in rows:
    i = int(answers['index'][row])
    title, _, pixels = examples.get(i, (f'{name} #{i}', None, None))
    top = zip(
      answers['top'][row].tolist(), answers['probability'][row].tolist(), strict=True
    )
    mistake = {'name': title, 'label': int(answers['label'][row]), 'top': list(top)}
    picture = None if pixels is None else url(pixels)
    out.append({**mistake, 'picture': picture, 'heat': heats.get(i)})
  return out, why


def read(run: Run, name: str, indices) -> tuple[dict[int, tuple], list[str]]:
  """Reads examples of an evaluation again; returns ({index: example}, reasons for failures).

  An example is (name, or path if it has one; image as the source has it; pixels as the
  model sees them, uint8 [H, W, C]).
  """
  try:
    data = run.evals.get(name, {}).get('data')
    if data is None:
      raise RunError('config.json has no evaluation of this name.')
    options = data.get('source_options') or {}
    classes = data.get('classes')
    source = sources.build(data['source'], data['split'], classes=classes, **options)
    indices, out = [int(i) for i in indices if i < len(source)], {}
    for i, example in zip(indices, source.read(np.array(indices, int)), strict=True):
      with contextlib.suppress(BadImage):
        if 'error' not in example:
          image = example['image']
          out[i] = run.shorten(source.name_of(i)), image, _pixels(image, data['pp'])
    return out, []
  except (RunError, OSError) as error:
    # The data is gone, or out of reach.
    return {}, [f'{name}: pictures. {error}']


def _pixels(image, pp: str) -> np.ndarray:
  """Preprocesses an image and scales it to uint8 [H, W, C]."""
  if not isinstance(image, np.ndarray) and not re.match(r'\s*decode\b', pp):
    pp = f'decode|{pp}'
  x = single_image.SingleImage(pp, masks=True)(image)
  # Pipelines have different ranges. An image outside of [-1, 1] is scaled by its own range.
  low, high = (-1.0, 1.0) if np.abs(x).max() <= 1 else (x.min(), x.max())
  return np.uint8((x - low) / max(high - low, 1e-6) * 255 + 0.5)


def _heats(run: Run, name: str, examples: dict[int, tuple]) -> dict[int, str]:
  """Draws the attention rollout over images: {index: data URL}."""
  if jax.process_count() > 1:
    raise RunError(
      'With several processes, all must restore a checkpoint: run vit_jax report in one.'
    )
  from vit_jax import explain, weights
  from vit_jax.explain import plots

  ema = run.evals[name].get('use_ema', False)
  loaded = weights.load(str(run.path), ema=ema, dtype='float32')
  maps = explain.attention_maps(loaded, [image for _, image, _ in examples.values()])
  pairs = zip(examples.items(), maps, strict=True)
  return {i: url(np.uint8(255 * plots.heat(x / 255, y))) for (i, (*_, x)), y in pairs}


def url(pixels, side: int = 160) -> str:
  """Returns the data URL of uint8 [H, W, C] or a Pillow image, at most `side` pixels large."""
  if isinstance(pixels, np.ndarray):
    pixels = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
  small, file = pixels.copy(), io.BytesIO()
  small.thumbnail((side, side))
  small.save(file, 'JPEG', quality=75)
  return f'data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}'
