"""The figure of where queries look, of a detector whose answers are known."""

import csv
import json

import numpy as np
import pytest

from tests.support import bright_detector
from vit_jax import cli
from vit_jax.tools import source
from vit_jax.tools.figures import __main__ as figures

pytestmark = pytest.mark.usefixtures('one_device')


def test_boxes_of_every_query_on_every_image(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(source, 'load', lambda args: bright_detector.loaded())
  bright_detector.write_data(tmp_path)
  out = tmp_path / 'figures'
  data = ['--data', f'coco:{tmp_path}/G.json,{tmp_path}', '--split', 'train']
  argv = ['slots', 'D', *data, '--count', '2', '--out', str(out), '--json']
  assert cli.run(figures.main, argv) == 0
  record = json.loads(capsys.readouterr().out)
  assert 'first 2 of 3 queries' in record['notes'][0]
  assert (out / 'slots.png').exists()
  with (out / 'slots.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [(row['query'], row['image']) for row in rows] == [
    (str(q), str(i)) for q in range(2) for i in range(12)
  ]
  truth = json.loads((tmp_path / 'G.json').read_text())
  for row in rows[12:]:  # of the query that finds the box
    i = int(row['image'])
    left, top, w, h = next(
      x['bbox'] for x in truth['annotations'] if x['image_id'] == 10 + i
    )
    size = truth['images'][i]
    W, H = size['width'], size['height']
    want = (left + w / 2) / W, (top + h / 2) / H, w / W, h / H
    found = [float(row[key]) for key in ('x', 'y', 'width', 'height')]
    np.testing.assert_allclose(found, want, atol=0.04)
