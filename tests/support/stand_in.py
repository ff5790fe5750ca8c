"""The folder of a finished run, written without training."""

import json
from collections.abc import Callable
from pathlib import Path

from vit_jax.train import program

RESOLVED = dict(format=2, total_steps=4, num_examples=64, image_shape=[16, 16, 1])


def write_run(workdir: Path, config: dict, *rows: dict, **resolved) -> None:
  """Writes config.json, of 64 gray images of 16 x 16 pixels, and metrics.jsonl."""
  workdir.mkdir(parents=True, exist_ok=True)
  model = {'name': 'vit', **config['model'], 'num_classes': 10}
  if 'name' not in config['model']:
    model['variant'] = 'mu/4'
  config = {'data': {}, **config, 'model': model, 'resolved': RESOLVED | resolved}
  text = json.dumps(config)
  (workdir / 'config.json').write_text(text)
  lines = ''.join(json.dumps(row) + '\n' for row in rows)
  (workdir / 'metrics.jsonl').write_text(lines)


def replace_training(monkeypatch, rows: Callable[[dict, Path], list[dict]]) -> None:
  """Replaces the training of grids: `rows(config, workdir)` of a run, which may raise."""

  def train(config, workdir, command, spec):
    write_run(workdir, config, *rows(config, workdir))

  monkeypatch.setattr(program, 'train', train)


def outcome(value: float | Exception) -> float:
  """Returns a number, or raises an exception."""
  if isinstance(value, Exception):
    raise value
  return value
