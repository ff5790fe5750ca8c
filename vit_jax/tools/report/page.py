"""The page of runs: their numbers and pictures in one HTML file."""

import datetime
import importlib.resources
import json
import math

import jinja2
import numpy as np

from vit_jax import files, tasks
from vit_jax.errors import RunError
from vit_jax.evaluators import predictions
from vit_jax.tools.report import curves, numbers, pictures
from vit_jax.tools.report.folder import Run
from vit_jax.version import __version__

_MISTAKES, _EACH_MISTAKES = (
  72,
  12,
)  # Pictures on a page and of an evaluation, 10 kB each
_CONFUSIONS, _WORST = 100, 20  # rows of the tables
_CELLS = 40  # classes of a confusion matrix that is drawn
_MOST_BAD = 100  # unreadable images that are listed


def render(runs: list[Run], attended: float = math.inf) -> tuple[str, list[str]]:
  """Returns (the HTML, a sentence for each thing that had to be left out).

  Args:
    attended: for how many evaluations of a run to map where the model looked; each
      reads a checkpoint and compiles the model.
  """
  left_out = []
  total = max(1, sum(len(run.predictions) for run in runs))
  most = max(1, min(_EACH_MISTAKES, _MISTAKES // total))
  sections = []
  for run in runs:
    evaluations = [
      _evaluation(run, name, most, i < attended)
      for i, name in enumerate(run.predictions)
    ]
    missing = [*run.left_out, *(x for e in evaluations for x in e['left_out'])]
    if not run.predictions and tasks.classifies(run.config):
      how = f' vit_jax evaluate {run.path} --out {run.path} writes it.'
      missing.append(
        'Confusion, calibration and mistakes: there is no predictions.npz.'
        + ('' if files.is_url(run.path) else how)  # --out is on disk
      )
    prefix = f'{run.name}: ' if len(runs) > 1 else ''
    left_out += [prefix + line for line in missing]
    sections.append({'run': run, 'evaluations': evaluations, **_about(run)})
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader('vit_jax.tools.report', 'template'),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  html = environment.get_template('page.html').render(
    title=runs[0].name if len(runs) == 1 else f'{len(runs)} runs',
    style=_file('uPlot.min.css') + _file('page.css'),
    script=_file('uPlot.iife.min.js') + _file('page.js'),
    sections=sections,
    results=_results(runs),
    left_out=left_out,
    data={'runs': [run.name for run in runs], 'charts': curves.charts(runs)},
    footer=f'vit_jax {__version__}, '
    + datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M UTC'),
  )
  return html, left_out


def _file(name: str) -> str:
  folder = importlib.resources.files('vit_jax.tools.report') / 'template'
  return (folder / name).read_text(encoding='utf-8')


def _results(runs: list[Run]) -> list[dict]:
  """Returns the tables of results: caption, head and rows."""
  results = [numbers.results(run) for run in runs]
  names = list(dict.fromkeys(name for result in results for name in result))
  if len(runs) == 1:
    rows = [(name, *results[0][name]) for name in names]
    return [_table('Results', ('measured last', 'value', 'spread'), rows)]
  head = ('measured last', *(run.name for run in runs))
  rows = [(n, *(result.get(n, ('',))[0] for result in results)) for n in names]
  tables = [_table('Results', head, [('state', *map(state, runs)), *rows])]
  for group in numbers.repeats(runs):
    title = f'Mean ± standard deviation over {len(group)} seeds: '
    title += ', '.join(run.name for run in group)
    rows = list(numbers.over_seeds(group).items())
    tables.append(_table(title, ('', 'value'), rows))
  if differ := numbers.differences(runs):
    head = ('key of the config', *(run.name for run in runs))
    rows = [(key, *values) for key, values in differ.items()]
    tables.append(_table('Differences of the configs', head, rows))
  return tables


def _table(caption: str, head, rows) -> dict:
  return {'caption': caption, 'head': head, 'rows': rows}


def state(run: Run) -> str:
  """Returns 'finished, 561 steps', or how far the run is."""
  status, total = run.status, run.config['resolved'].get('total_steps')
  if not status:
    return 'status.json cannot be read'
  steps = f'{status["step"]:,}'
  if status['step'] != total and total:
    steps += f' of {total:,}'
  stopped = status.get('stopped_early')
  early = f', stopped early: {stopped}' if stopped else ''
  return f'{status["state"]}, {steps} steps{early}'


def _about(run: Run) -> dict:
  """Returns facts, bad images, parameters, config, command, commit, machine and starts."""
  model, data, resolved = (
    run.config['model'],
    run.config['data'],
    run.config['resolved'],
  )
  H, W, C = resolved['image_shape']
  name = ':'.join(filter(None, (model['name'], model.get('variant'))))
  source = data.get('source')
  if not isinstance(source, str):
    source = f'a mixture of {len(source or ())} sources'
  examples = resolved.get('num_examples')
  images = f', {examples:,} images' if examples else ''
  last = run.starts[-1] if run.starts else {}
  resolved = {key: x for key, x in resolved.items() if key != 'class_names'}
  commands = [start['command'] for start in run.starts if start.get('command')]
  return {
    'facts': [
      state(run),
      f'{name} on {H} × {W} × {C} pixels',
      f'{source}, split {data.get("split")}{images}',
    ],
    'bad': _table(
      f'{len(run.bad_images)} images could not be read',
      ('image', 'reason'),
      [(x['path'], x.get('reason', '')) for x in run.bad_images[:_MOST_BAD]],
    ),
    'parameters': _parameters(run, last),
    'config': json.dumps(run.config | {'resolved': resolved}, indent=2),
    'command': commands[-1] if commands else None,
    'commit': last.get('git'),
    'machine': _machine(last),
    'starts': _table(
      f'Started {len(run.starts)} times',
      ('started', 'from step', 'device', 'vit_jax'),
      [
        (x.get('time'), f'{x["step"]:,}', x.get('device'), x.get('vit_jax'))
        for x in run.starts
      ],
    ),
  }


def _parameters(run: Run, start: dict) -> dict:
  if not start:
    trained = run.status.get('trained_parameters')
    rows = [('trained', f'{trained:,}', '')] if trained else []
  else:
    parts, trained = start['parameters']['parts'], start['parameters']['trained']
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    rows = [(part, f'{n:,}', f'{n / max(total, 1):.1%}') for part, n in ordered]
    rows += [('total', f'{total:,}', ''), ('trained', f'{trained:,}', '')]
  return _table('Parameters', ('part', 'parameters', 'share'), rows)


def _machine(start: dict) -> dict:
  if not start:
    return {}
  memory = start.get('memory_bytes')
  return {
    'devices': f'{start.get("devices")} × {start.get("device")} ({start.get("platform")})',
    'processes': start.get('processes'),
    'host': f'{start.get("system")}, {start.get("cores")} cores',
    'memory': f'{memory / 2**30:.1f} GiB' if memory else '',
    'vit_jax': start.get('vit_jax'),
    'Python': start.get('python'),
    **start['packages'],
  }


def _evaluation(run: Run, name: str, most: int, attention: bool) -> dict:
  """Returns the template's values of an evaluation whose predictions are kept."""
  answers, left_out = run.predictions[name], []
  top = answers['top'][:, 0]
  classes = run.config['model'].get('num_classes') or 0
  confusion = numbers.confuse(answers['label'], top, classes)
  examples = None
  if 'data' not in run.evals.get(name, {}):
    left_out.append(f'{name}: pictures, as config.json has no evaluation of this name.')
  else:
    try:
      examples = pictures.Examples(run.evals[name]['data'])
    except (RunError, OSError) as error:  # the data is gone, or out of reach
      left_out.append(f'{name}: pictures. {error}')
  wrong, why = pictures.mistakes(run, name, examples, most, attention)
  if why:
    left_out.append(f'{name}: {why}')
  elif wrong and not attention:
    left_out.append(
      f'{name}: where the model looked, to save time. vit_jax report {run.path} adds it.'
    )
  n = len(top)
  sampled = n and answers['index'][-1] >= predictions.MOST
  some = ' (evenly spaced in the split)' if sampled else ''
  names = run.class_names
  class_of = lambda c: names[c] if names and 0 <= c < len(names) else f'class {c}'
  return {
    'title': f'{name}: {n:,} examples{some}, step {int(answers["step"]):,}',
    'class_of': lambda c: class_of(c) if c >= 0 else 'several labels',
    'mistakes': wrong,
    'confusion': confusion and _confusion(confusion, class_of),
    'calibration': numbers.calibrate(
      answers['probability'][:, 0], answers['right'][:, 0]
    ),
    'left_out': left_out,
  }


def _confusion(confusion: numbers.Confusion, class_of) -> dict:
  """Returns the matrix of few classes, the largest confusions, and the worst classes."""
  matrix = None
  if confusion.num_classes <= _CELLS:
    matrix = np.zeros((confusion.num_classes, confusion.num_classes), int)
    matrix[confusion.cells[:, 0], confusion.cells[:, 1]] = confusion.cells[:, 2]
    heat = np.sqrt(matrix / np.maximum(confusion.counts, 1)[:, None])
    rows = zip(matrix.tolist(), heat.tolist(), strict=True)
    matrix = [
      (class_of(c), list(zip(*cells, strict=True))) for c, cells in enumerate(rows)
    ]
  pairs = [
    (
      class_of(true),
      class_of(answer),
      f'{n:,}',
      f'{n / max(int(confusion.counts[true]), 1):.1%}',
    )
    for true, answer, n in confusion.largest(_CONFUSIONS).tolist()
  ]
  worst = [
    (
      class_of(c),
      f'{confusion.counts[c]:,}',
      f'{confusion.right[c] / confusion.counts[c]:.1%}',
      f'{confusion.predicted[c]:,}',
    )
    for c in confusion.worst(_WORST).tolist()
  ]
  head = ('class', 'examples', 'right', 'predicted')
  return {
    'matrix': matrix,
    'pairs': _table(
      'Largest confusions', ('is', 'taken for', 'examples', 'share'), pairs
    ),
    'worst': _table('Classes of lowest accuracy', head, worst),
  }
