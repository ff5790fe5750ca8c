"""vit_jax paper: claims that can go either way, and a table of verdicts."""

import pytest

from tests.support import commands, stand_in
from vit_jax.errors import Diverged
from vit_jax.lab import paper


def test_noise_is_two_standard_errors():
  # sqrt(2 * 0.5 * 0.5 / 200) = 0.05
  assert paper.noise(0.5, 0.5, 200) == pytest.approx(0.1, rel=0.01)
  assert 0.002 < paper.noise(1.0, 1.0, 360) < 0.02


def test_each_verdict(tmp_path, capsys, monkeypatch):
  accuracies = {'token': 0.9, 'gap': 0.91, 'gap-lower-lr': 0.5, 'map': 0.9}
  accuracies |= {'full': Diverged('not finite'), 'axial': 0.9, 'full-deeper': 0.9}

  def rows(config, workdir):
    value = accuracies[workdir.name.removesuffix('-seed0')]
    return [{'step': 4, 'test/top1': stand_in.outcome(value)}]

  stand_in.replace_training(monkeypatch, rows)
  argv = ['--only', 'head,axial', '--out', tmp_path]
  code, out, _ = commands.run(paper.main, capsys, *argv)
  assert code == Diverged.exit_code
  verdicts = {
    claim.text: line.split('|')[3].strip()
    for claim in paper.CLAIMS
    for line in out.splitlines()
    if line.startswith(f'| {claim.text} |')
  }
  assert list(verdicts.values()) == ['holds', 'does not hold', 'no result']
  assert (tmp_path / 'paper.md').read_text() in out
