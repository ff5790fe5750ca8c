"""The page: what was measured of runs, as one HTML file."""

import datetime
import importlib.resources
import math
import string

from vit_jax import files, tasks
from vit_jax.tools.report import about, curves, evaluation, spread
from vit_jax.tools.report import evaluation_section as section
from vit_jax.tools.report.folder import Run
from vit_jax.tools.report.markup import data, details, table, text
from vit_jax.version import __version__

# What all evaluations on a page share, so that it stays below 5 MB, and what each gets
# at most.
_ROOM = 2_000_000  # characters of thumbnails
_CELLS, _EACH_CELLS = 80_000, 20_000  # of confusion matrices: 15 characters each
_MISTAKES, _EACH_MISTAKES = 72, 12  # 10,000 characters each


def render(
  runs: list[Run], until: float = math.inf, attended: float = math.inf
) -> tuple[str, list[str]]:
  """Returns (the HTML, a sentence for each thing that had to be left out).

  Args:
    until: when to stop adding pictures, on the clock of `time.monotonic`.
    attended: for how many evaluations of a run to map where the model looked; each
      reads a checkpoint and compiles the model.
  """
  several, left_out = len(runs) > 1, []
  total = max(1, sum(len(run.predictions) for run in runs))
  effort = evaluation.Effort(
    _ROOM // total,
    min(_EACH_CELLS, _CELLS // total),
    max(1, min(_EACH_MISTAKES, _MISTAKES // total)),
    until,
  )
  analysed = [
    [
      evaluation.analyse(run, name, effort._replace(attention=i < attended))
      for i, name in enumerate(run.predictions)
    ]
    for run in runs
  ]
  for run, found in zip(runs, analysed, strict=True):
    prefix = f'{run.name}: ' if several else ''
    missing = [*run.left_out, *(x for e in found for x in e.left_out)]
    if not run.predictions and tasks.classifies(run.config):
      how = f' vit_jax evaluate {run.path} --out {run.path} writes it.'
      missing.append(
        'Confusion, calibration and mistakes: there is no predictions.npz.'
        + ('' if files.is_url(run.path) else how)  # --out is on disk
      )
    left_out += [prefix + line for line in missing]
  parts = [_header(runs), _summary(runs), _curves()]
  for number, (run, found) in enumerate(zip(runs, analysed, strict=True)):
    body = section.render(run, found, number) + about.render(run)
    parts.append(f'<section>{details(run.name, body)}</section>' if several else body)
  if left_out:
    items = ''.join(f'<li>{text(line)}</li>' for line in left_out)
    parts.append(f'<section id="left-out"><h2>Left out</h2><ul>{items}</ul></section>')
  names: dict[str, int] = {}
  page = {
    'runs': [run.name for run in runs],
    'charts': curves.charts(runs),
    'evaluations': [
      section.data_of(run, e, number, names)
      for number, (run, found) in enumerate(zip(runs, analysed, strict=True))
      for e in found
    ],
  }
  page['names'] = [name.split('\n') for name in names]
  template = string.Template(_file('page.html'))
  return template.substitute(
    title=text(_title(runs)),
    style=_file('page.css'),
    body='\n'.join(parts),
    data=data(page),
    script='\n'.join(_file(name) for name in ('charts.js', 'confusion.js', 'page.js')),
    footer=text(f'vit_jax {__version__}, {_now()}'),
  ), left_out


def _title(runs: list[Run]) -> str:
  return runs[0].name if len(runs) == 1 else f'{len(runs)} runs'


def _header(runs: list[Run]) -> str:
  if len(runs) > 1:
    return f'<header><h1>{text(_title(runs))}</h1></header>'
  (run,) = runs
  facts = [about.state(run), about.model(run), about.data(run)]
  line = ' · '.join(text(fact) for fact in facts if fact)
  return f'<header><h1>{text(run.name)}</h1><p class="facts">{line}</p></header>'


def _summary(runs: list[Run]) -> str:
  results = [spread.results(run) for run in runs]
  names = list(dict.fromkeys(name for found in results for name in found))
  if len(runs) == 1:
    (found,) = results
    rows = [(name, *found[name]) for name in names]
    body = table(('measured last', 'value', 'spread'), rows, 'Results')
    note = (
      'Spread of an accuracy: its 95 % confidence interval (Wilson score interval) for '
      'the number of examples it was measured on.'
    )
  else:
    cell = lambda found, name: found.get(name, ('',))[0]
    head = ('measured last', *(run.name for run in runs))
    rows = [(n, *(cell(found, n) for found in results)) for n in names]
    rows.insert(0, ('state', *map(about.state, runs)))
    body = table(head, rows, 'Results')
    for group in spread.repeats(runs):
      title = f'Mean ± standard deviation of {", ".join(run.name for run in group)}'
      rows = spread.over_seeds(group).items()
      body += f'<h3>Over {len(group)} seeds</h3>' + table(('', 'value'), rows, title)
    if differ := spread.differences(runs):
      head = ('key of the config', *(run.name for run in runs))
      rows = [(key, *values) for key, values in differ.items()]
      body += '<h3>What differs</h3>' + table(head, rows, 'Differences of the configs')
    note = ''
  note = f'<p class="note">{note}</p>' if note else ''
  return f'<section id="results"><h2>Results</h2>{body}{note}</section>'


def _curves() -> str:
  return (
    '<section id="curves"><h2>Curves</h2><div id="charts" class="charts"></div>'
    '<p class="note">Point at a curve, or focus a chart and use the arrow keys. '
    'Long curves show the highest and the lowest point of each stretch.</p></section>'
  )


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M UTC')


def _file(name: str) -> str:
  folder = importlib.resources.files('vit_jax.tools.report') / 'template'
  return (folder / name).read_text(encoding='utf-8')
