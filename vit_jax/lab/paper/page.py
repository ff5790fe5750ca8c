"""The page: each claim of the paper beside what was seen."""

import base64
import datetime
import importlib.resources
import platform
import statistics
import string
from pathlib import Path
from typing import NamedTuple

from vit_jax.lab.paper import claims, experiments, figures, verdicts
from vit_jax.lab.paper.markup import code, details, table, text
from vit_jax.lab.paper.seen import Missing, Seen
from vit_jax.version import __version__

_MARKS = {
  verdicts.SEEN: 'yes',
  verdicts.PARTLY: 'half',
  verdicts.NOT_SEEN: 'no',
  verdicts.LOOK: 'look',
  verdicts.NOT_TESTED: 'open',
}
_MOST = 6  # metrics in a table


class Judged(NamedTuple):
  """A claim and its verdict."""

  claim: claims.Claim
  verdict: str
  why: str


def judge(seen: Seen) -> dict[str, list[Judged]]:
  """Returns {topic: its claims, judged}."""
  return {
    topic: [_judged(claim, seen) for claim in found]
    for topic, found in claims.CLAIMS.items()
  }


def _judged(claim, seen: Seen) -> Judged:
  try:
    verdict, why = claim.judge(seen)
  except Missing as error:
    verdict, why = verdicts.NOT_TESTED, f'Its experiment has no result: {error}.'
  return Judged(claim, verdict, why)


def render(seen: Seen, seconds: dict[str, float], failed: dict[str, str]) -> str:
  """Returns the page, one file of HTML that asks no server for anything.

  Args:
    seconds: that each experiment took, this time.
    failed: 'EXPERIMENT' or 'figure NAME' -> why it has no result.
  """
  found = judge(seen)
  parts = [_header(found)]
  number = 0
  for topic, each in found.items():
    parts.append(f'<h2>{text(topic)}</h2>')
    for judged in each:
      number += 1
      parts.append(_section(number, judged, seen))
  parts += [_experiments(seen, seconds, failed), _readers()]
  folder = importlib.resources.files('vit_jax.tools')
  style = (folder / 'report/template/page.css').read_text(encoding='utf-8')
  own = (folder / 'paper/template/page.css').read_text(encoding='utf-8')
  page = (folder / 'paper/template/page.html').read_text(encoding='utf-8')
  made = datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M UTC')
  return string.Template(page).substitute(
    style=style + own,
    body='\n'.join(parts),
    footer=text(f'vit_jax {__version__}, {made}, on {platform.processor() or "CPU"}'),
  )


def _header(found: dict[str, list[Judged]]) -> str:
  each = [judged for topic in found.values() for judged in topic]
  count = lambda verdict: sum(judged.verdict == verdict for judged in each)
  told = ', '.join(f'{count(v)} {v}' for v in verdicts.VERDICTS if count(v))
  number, rows = 0, []
  for topic in found.values():
    for judged in topic:
      number += 1
      rows.append(
        f'<tr><td><a href="#claim-{number}">{text(judged.claim.text)}</a></td>'
        f'<td>{_verdict(judged.verdict)}</td></tr>'
      )
  return (
    '<header><h1>The ViT paper in miniature</h1>'
    f'<p class="facts">{len(each)} claims: {told}.</p></header>'
    '<p>Claims of "An Image is Worth 16x16 Words" (arXiv 2010.11929) and of lectures on '
    'it, each beside what minutes on a CPU show: small models, 1,437 handwritten digits '
    'and 10,000 images of coloured shapes to train on. A claim about large models and '
    'hundreds of millions of images may well be true and not show here; where it does '
    'not, the likely reason is given. A difference counts if it is larger than two '
    'standard errors for the number of test images, which is 2 points at 98 % of 360 '
    'digits. Chance in training is not part of that: only the position embeddings are '
    'trained with three seeds, all else with one. The names after a section of the '
    'paper are of those who repeat the claim, listed at the end.</p>'
    '<div class="scroll" tabindex="0" role="region" aria-label="All claims"><table>'
    '<thead><tr><th scope="col">claim</th><th scope="col">here</th></tr></thead>'
    f'<tbody>{"".join(rows)}</tbody></table></div>'
  )


def _verdict(verdict: str) -> str:
  return f'<span class="verdict {_MARKS[verdict]}">{text(verdict)}</span>'


def _section(number: int, judged: Judged, seen: Seen) -> str:
  claim = judged.claim
  body = [
    f'<section class="claim" id="claim-{number}"><h3>{text(claim.text)}</h3>',
    f'<p class="facts">{text(claim.where)}</p>',
    f'<p>{_verdict(judged.verdict)} {text(judged.why)}</p>',
  ]
  for name in claim.experiments:
    if seen.is_ablation(name):
      title = experiments.EXPERIMENTS[name].title
      body.append(details(f'Numbers (accuracies in %): {title}', _numbers(name, seen)))
  for name in claim.figures:
    path = seen.out / 'figures' / f'{name}.png'
    if path.exists():
      body.append(_picture(path, figures.TITLES[name], figures.shown(name, seen.out)))
  return '\n'.join([*body, '</section>'])


def _numbers(name: str, seen: Seen) -> str:
  cells = seen.cells(name)
  metrics = list(
    dict.fromkeys(
      key
      for cell in cells.values()
      for key in cell
      if '/' in key and not key.endswith(('loss', '/examples'))
    )
  )[:_MOST]
  rows = [
    (
      cell,
      f'{numbers["parameters"][0]:,.0f}',
      f'{numbers["gflops"][0]:.4g}',
      *(_mean(numbers.get(key)) for key in metrics),
      len(numbers['seed']),
    )
    for cell, numbers in cells.items()
  ]
  head = ('', 'parameters', 'GFLOPs', *metrics, 'seeds')
  body = table(head, rows, experiments.EXPERIMENTS[name].title)
  picture = seen.out / name / f'{name}.png'
  if picture.exists():
    body += _picture(picture, experiments.EXPERIMENTS[name].title)
  return body


def _mean(values: list[float] | None) -> str:
  """Returns '97.50 ± 0.28' of shares, in per cent."""
  if not values:
    return ''
  mean = f'{100 * statistics.fmean(values):.2f}'
  if len(values) == 1:
    return mean
  return f'{mean} ± {100 * statistics.stdev(values):.2f}'


def _picture(path: Path, title: str, command: str = '') -> str:
  data = base64.b64encode(path.read_bytes()).decode()
  below = f'<br><code>{text(command)}</code>' if command else ''
  return (
    f'<figure><img alt="{text(title)}" src="data:image/png;base64,{data}">'
    f'<figcaption>{text(title)}{below}</figcaption></figure>'
  )


def _experiments(seen: Seen, seconds: dict[str, float], failed: dict[str, str]) -> str:
  rows = []
  for name, experiment in experiments.EXPERIMENTS.items():
    took = f'{seconds[name]:.0f} s' if name in seconds else ''
    rows.append((experiment.title, took, failed.get(name, '')))
  commands = '\n'.join(
    experiments.shown(name, seen.out) for name in experiments.EXPERIMENTS
  )
  lost = ''.join(
    f'<li>{text(name)}: {text(why)}</li>'
    for name, why in failed.items()
    if name not in experiments.EXPERIMENTS
  )
  return (
    '<section><h2>Experiments</h2>'
    + '<p>Without a time: not part of the last call.</p>'
    + table(('', 'time of the last call', 'failed'), rows, 'Experiments')
    + (f'<p>Figures that could not be drawn:</p><ul>{lost}</ul>' if lost else '')
    + details('The commands', code(commands))
    + '</section>'
  )


def _readers() -> str:
  items = ''.join(
    f'<div><dt>{text(name)}</dt><dd>{text(what)}</dd></div>'
    for name, what in claims.READERS.items()
  )
  return f'<section><h2>Who repeats the claims</h2><dl>{items}</dl></section>'
