"""The page of runs: their numbers and pictures in one HTML file."""

import datetime
import importlib.resources
import json
from collections import Counter

import jinja2

from vit_jax import distributed, files, tasks
from vit_jax.tools.report import numbers, pictures
from vit_jax.tools.report.folder import Run, read
from vit_jax.version import __version__

_MISTAKES, _EACH = 72, 12  # Pictures on a page and of an evaluation, 10 kB each
_CONFUSIONS = 100  # rows of the table
_CELLS = 40  # classes of a confusion matrix that is drawn
_MOST_BAD = 100  # unreadable images that are listed


def write(workdir: str) -> str | None:
  """Writes the page of a finished run into its folder; returns its address.

  If that fails in any way, it prints one line on stderr and returns None: the run itself
  has succeeded. Of several processes only the first writes it.
  """
  if not distributed.is_first():
    return None
  try:
    html, _ = render(read([workdir]))
    path = files.path(workdir) / 'report.html'
    files.replace(path, html.encode())
  except (Exception, KeyboardInterrupt) as error:
    why = ' '.join(str(error).split())[:200] or type(error).__name__
    distributed.say(
      f'warning: no page of the run ({why}); vit_jax report {workdir} tries again.'
    )
    return None
  return address(path)


def address(path) -> str:
  """Returns the file:// address of a path, or gs:// of an object in a bucket."""
  return str(path) if files.is_url(path) else path.absolute().as_uri()


def render(runs: list[Run]) -> tuple[str, list[str]]:
  """Returns (the HTML, a sentence for each thing that had to be left out)."""
  left_out, sections = [], []
  total = max(1, sum(len(run.predictions) for run in runs))
  most = max(1, min(_EACH, _MISTAKES // total))
  for run in runs:
    evaluations = [_evaluation(run, name, most) for name in run.predictions]
    missing = [*run.left_out, *(e['why'] for e in evaluations if e['why'])]
    if not run.predictions and tasks.of(run.config).CLASSES:
      how = f'vit_jax evaluate {run.path} --out {run.path} writes predictions.npz.'
      missing.append(f'Confusion, calibration and mistakes: {how}')
    prefix = f'{run.name}: ' if len(runs) > 1 else ''
    left_out += [prefix + line for line in missing]
    sections.append({'run': run, 'evaluations': evaluations, **_about(run)})
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader('vit_jax.tools.report', 'template'),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  results = [{'state': state(run), **numbers.results(run)} for run in runs]
  names = dict.fromkeys(name for result in results for name in result)
  now = datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M UTC')
  html = environment.get_template('page.html').render(
    title=runs[0].name if len(runs) == 1 else f'{len(runs)} runs',
    style=_file('uPlot.min.css') + _file('page.css'),
    script=_file('uPlot.iife.min.js') + _file('page.js'),
    sections=sections,
    results=[(name, *(result.get(name, '') for result in results)) for name in names],
    left_out=left_out,
    data={'runs': [run.name for run in runs], 'charts': numbers.charts(runs)},
    footer=f'vit_jax {__version__}, {now}',
  )
  return html, left_out


def _file(name: str) -> str:
  folder = importlib.resources.files('vit_jax.tools.report') / 'template'
  return (folder / name).read_text(encoding='utf-8')


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
  """Returns bad images, config, command, commit and machine."""
  resolved = {k: x for k, x in run.config['resolved'].items() if k != 'class_names'}
  last = run.starts[-1] if run.starts else {}
  commands = [start['command'] for start in run.starts if start.get('command')]
  machine = {
    'devices': f'{last.get("devices")} × {last.get("device")}',
    'processes': last.get('processes'),
    'host': f'{last.get("system")}, {last.get("cores")} cores',
    'vit_jax': last.get('vit_jax'),
    'Python': last.get('python'),
    'trained parameters': f'{last["parameters"]["trained"]:,}' if last else '',
    **last.get('packages', {}),
  }
  return {
    'bad': [(x['path'], x.get('reason', '')) for x in run.bad_images[:_MOST_BAD]],
    'config': json.dumps(run.config | {'resolved': resolved}, indent=2),
    'command': commands[-1] if commands else None,
    'commit': last.get('git'),
    'machine': machine if last else {},
  }


def _evaluation(run: Run, name: str, most: int) -> dict:
  """Returns the template's values of an evaluation whose predictions are stored."""
  answers, names = run.predictions[name], run.class_names
  mistakes, why = pictures.mistakes(run, name, most)
  plain = lambda k: names[k] if names and 0 <= k < len(names) else f'class {k}'
  class_of = lambda k: plain(k) if k >= 0 else 'several labels'
  # (true class, predicted class), without the examples that have several labels.
  label, predicted = answers['label'].tolist(), answers['top'][:, 0].tolist()
  confused = Counter(
    pair for pair in zip(label, predicted, strict=True) if pair[0] >= 0
  )
  sizes = Counter(k for k in label if k >= 0)
  classes = run.config['model'].get('num_classes') or 0
  return {
    'title': f'{name}: {len(answers["top"]):,} examples, step {int(answers["step"]):,}',
    'why': why,
    'class_of': class_of,
    'mistakes': mistakes,
    'matrix': range(classes) if classes <= _CELLS else [],
    'confused': confused,
    'sizes': sizes,
    'pairs': [
      (class_of(true), class_of(answer), n, f'{n / sizes[true]:.1%}')
      for (true, answer), n in confused.most_common()
      if true != answer
    ][:_CONFUSIONS],
    'calibration': numbers.calibrate(
      answers['probability'][:, 0], answers['right'][:, 0]
    ),
  }
