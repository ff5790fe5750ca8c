"""Draws a figure of `tools.figures`, and reads its table."""

import base64
import csv
import io

import numpy as np
import pytest
from PIL import Image

from vit_jax import cli
from vit_jax.tools.figures import __main__ as figures


@pytest.fixture(autouse=True)
def small_figures(monkeypatch):
  """Pictures of fewer pixels, which are written faster."""
  from vit_jax.explain import plots

  monkeypatch.setitem(plots.style.STYLE, 'savefig.dpi', 60)


def run(*args):
  return cli.run(figures.main, [str(a) for a in args])


def draw(name, *args, out):
  """Returns the rows of the table; looks at the picture."""
  assert run(name, *args, '--out', out) == 0
  return table(name, out)


def table(name, out):
  with Image.open(out / f'{name}.png') as image:
    pixels = np.asarray(image.convert('L'))
  assert min(pixels.shape) > 40
  assert pixels.std() > 5
  with (out / f'{name}.csv').open(encoding='utf-8') as file:
    return list(csv.DictReader(file))


def decoded(url: str) -> np.ndarray:
  """Returns the pixels of a picture in a data URL."""
  data = base64.b64decode(url.partition(',')[2])
  return np.asarray(Image.open(io.BytesIO(data)))
