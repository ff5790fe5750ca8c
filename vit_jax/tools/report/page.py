"""Renders the page of runs: their numbers and pictures in one HTML file."""

import datetime
import importlib.resources
import json
from collections import Counter

import jinja2

from vit_jax import distributed, files, losses, tasks
from vit_jax.check import parse_options
from vit_jax.registry import Registry
from vit_jax.tools.report import head, numbers, pictures
from vit_jax.tools.report.folder import Run, read
from vit_jax.version import __version__

# Maximum number of pictures of mistakes on a page, and for one evaluation. A picture takes 10
# kB.
_MISTAKES, _EACH = 72, 12
# Maximum number of rows in the table of confused classes.
_CONFUSIONS = 100
# Maximum number of classes for which a confusion matrix is drawn.
_CELLS = 40
# Maximum number of unreadable images that are listed.
_MOST_BAD = 100
# For each type of evaluation whose answers are not classes: a function(run, name of the
# evaluation) that returns the template's values.
PARTS = Registry('part of a page', {})


def write(workdir: str) -> str | None:
  """Writes the page of a finished run into its folder, and returns its address.

  Any failure is printed as one line on stderr, and None is returned, because the run itself
  has succeeded. Only the first of several processes writes the page.
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
  """Returns the address of a path: file://, or gs:// for an object in a bucket."""
  return str(path) if files.is_url(path) else path.absolute().as_uri()


def render(runs: list[Run]) -> tuple[str, list[str]]:
  """Returns (the HTML, a sentence for each missing part of the page)."""
  left_out, sections, charts = [], [], {'curves': numbers.charts(runs)}
  total = max(1, sum(len(run.predictions) for run in runs))
  most = max(1, min(_EACH, _MISTAKES // total))
  for number, run in enumerate(runs):
    evaluations = []
    for name in run.predictions:
      # Attention takes seconds. It is drawn only for the evaluation that is open at first.
      look, key = len(runs) == 1 and not evaluations, f'{number} {name}'
      evaluations.append({**_evaluation(run, name, most, look), 'key': key})
      charts[key] = evaluations[-1]['charts']
    missing = [*run.left_out, *(line for e in evaluations for line in e['why'])]
    if not run.predictions and tasks.class_of(run.config).CLASSES:
      how = f'vit_jax evaluate {run.path} --out {run.path}'
      missing.append(f'Answers, right and wrong: the next evaluation, or {how}.')
    prefix = f'{run.name}: ' if len(runs) > 1 else ''
    left_out += [prefix + line for line in missing]
    sections.append({'run': run, 'evaluations': evaluations, **_describe_run(run)})
  html = fill_template(
    'page.html',
    title=runs[0].name if len(runs) == 1 else f'{len(runs)} runs',
    plots=_file('uPlot.min.css'),
    script=_file('uPlot.iife.min.js') + _file('page.js'),
    sections=sections,
    cards=head.deciding(runs[0]) if len(runs) == 1 else [],
    results=head.compare_runs(runs),
    left_out=left_out,
    data={'runs': [run.name for run in runs], 'charts': charts},
  )
  return html, left_out


def fill_template(template: str, **values) -> str:
  """Fills a template with values, the style and the footer of all pages; returns HTML."""
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader('vit_jax.tools.report', 'template'),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  now = datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M UTC')
  values |= {'style': _file('page.css'), 'footer': f'vit_jax {__version__}, {now}'}
  return environment.get_template(template).render(**values)


def _file(name: str) -> str:
  folder = importlib.resources.files('vit_jax.tools.report') / 'template'
  return (folder / name).read_text(encoding='utf-8')


def _describe_run(run: Run) -> dict:
  """Returns the template's values about a run: facts, bad images, config, command, machine."""
  resolved = {k: x for k, x in run.config['resolved'].items() if k != 'class_names'}
  last = run.starts[-1] if run.starts else {}
  commands = [start['command'] for start in run.starts if start.get('command')]
  return {
    'facts': head.facts(run),
    'sentences': head.sentences(run),
    'bad': [
      (run.shorten(x['path']), x.get('reason', '')) for x in run.bad_images[:_MOST_BAD]
    ],
    'config': json.dumps(run.config | {'resolved': resolved}, indent=2),
    'command': commands[-1] if commands else None,
    'commit': last.get('git'),
    'machine': json.dumps(last, indent=2),
  }


def _evaluation(run: Run, name: str, most: int, look: bool) -> dict:
  """Returns the template's values about an evaluation whose predictions are stored."""
  answers, kind = run.predictions[name], run.evals.get(name, {}).get('type')
  step = f'step {int(answers["step"]):,}'
  if kind in PARTS:
    return {'title': f'{name}, {step}', **PARTS[kind](run, name)}
  mistakes, why = pictures.mistakes(run, name, most, look)
  # (true class, predicted class), without the examples that have several labels.
  label, predicted = answers['label'].tolist(), answers['top'][:, 0].tolist()
  loss, _ = parse_options(run.evals.get(name, {}).get('loss', 'softmax'))
  confused = Counter(
    pair for pair in zip(label, predicted, strict=True) if pair[0] >= 0
  )
  sizes = Counter(k for k in label if k >= 0)
  classes = run.config['model'].get('num_classes') or 0
  calibration = numbers.calibrate(answers['probability'][:, 0], answers['right'][:, 0])
  return {
    'title': f'{name}: {len(answers["top"]):,} examples, {step}',
    'why': why,
    'class_of': run.class_of,
    'mistakes': mistakes,
    'exclusive': loss not in losses.BINARY or -1 not in label,
    'matrix': range(classes) if classes <= _CELLS else [],
    'short': all(len(run.class_of(k)) < 4 for k in range(classes)),
    'confused': confused,
    'sizes': sizes,
    'pairs': [
      (run.class_of(true), run.class_of(answer), n, f'{n / sizes[true]:.1%}')
      for (true, answer), n in confused.most_common()
      if true != answer
    ][:_CONFUSIONS],
    'calibration': calibration,
    'calibrated': [
      (f'{low:.1%} to {high:.1%}', f'{n:,}', f'{share:.1%}', f'{right:.1%}')
      for low, high, n, share, right in (calibration or {}).get('rows', ())
    ],
    'softened': head.describe_softening(run),
    'charts': [numbers.reliability(calibration['rows'])] if calibration else [],
    'classes': numbers.class_rows(label, predicted, run.class_of),
  }
