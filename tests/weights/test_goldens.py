"""Published formats: each loads by its path alone and computes what its library does."""

import numpy as np
import pytest

from tests.support import GOLDEN
from tests.support.goldens import GOLDENS, check, path_of
from vit_jax import models


@pytest.mark.parametrize('name', GOLDENS)
def test_golden_loads_by_its_path_and_agrees(name):
  loaded = check(path_of(name), name)
  format, family, _ = GOLDENS[name]
  assert loaded.format == format
  expected = np.load(GOLDEN / f'{name}.expected.npz')
  # The size is in a config beside the arrays, or follows from a table of positions.
  any_size = models.family_of(loaded.model).any_size(models.fields_of(loaded.model))
  tells = 'image' in expected and (path_of(name).is_dir() or not any_size)
  size = expected['image'].shape[1:3] if tells else (224, 224)
  assert loaded.image_size == {'detr': (1333, 1333)}.get(family, size)


def test_a_scanned_model_takes_the_same_file():
  check(path_of('vit_google_token'), 'vit_google_token', scan=True)
