"""An evaluation on the page: confusion, calibration, the most confident mistakes."""

from vit_jax.tools.report import reliability
from vit_jax.tools.report.evaluation import Evaluation
from vit_jax.tools.report.folder import Run
from vit_jax.tools.report.markup import details, pairs, table, text
from vit_jax.tools.report.mistakes import Mistake


def render(run: Run, found: list[Evaluation], number: int) -> str:
  """Returns the sections of a run's evaluations; the first is open.

  Args:
    number: of the run on the page.
  """
  parts = []
  for i, e in enumerate(found):
    key = f'{number}-{i}'
    some = ' (evenly spaced in the split)' if e.sampled else ''
    title = f'{e.name}: {e.examples:,} examples{some}, step {e.step:,}'
    body = _mistakes(run, e, key) + _confusion(run, e, key) + _calibration(e)
    parts.append(details(title, body, opened=i == 0))
  if not parts:
    return ''
  return f'<section><h2>What it gets wrong</h2>{"".join(parts)}</section>'


def data_of(run: Run, e: Evaluation, number: int, names: dict[str, int]) -> dict:
  """Returns what confusion.js draws of an evaluation.

  Args:
    number: of the run on the page.
    names: {class names, joined: their number}; the run's are added to it.
  """
  found = {'id': f'{number}-{list(run.predictions).index(e.name)}'}
  if e.confusion is None:
    return found
  found['classes'] = e.confusion.num_classes
  found['cells'] = e.cells.ravel().tolist()
  found['counts'] = e.confusion.counts.tolist()
  found['thumbnails'] = e.thumbnails
  found['names'] = None
  if run.class_names:
    joined = '\n'.join(name.replace('\n', ' ') for name in run.class_names)
    found['names'] = names.setdefault(joined, len(names))
  return found


def _name(run: Run, index: int) -> str:
  names = run.class_names
  return names[index] if names and 0 <= index < len(names) else f'class {index}'


def _confusion(run: Run, e: Evaluation, key: str) -> str:
  if e.confusion is None:
    return (
      '<h3>Confusion</h3><p class="note">Not counted: every example has several '
      'labels.</p>'
    )
  K, largest = e.confusion.num_classes, e.confusion.largest()
  label = (
    f'Confusion matrix of {K:,} classes; arrow keys move over its cells. The largest '
    'confusions are listed below it.'
  )
  note = ''
  if e.cells_left_out:
    note = f' The smallest cells, {e.cells_left_out:,} examples in all, are not drawn.'
  body = (
    f'<h3>Confusion</h3><div class="matrix" data-evaluation="{key}">'
    f'<canvas tabindex="0" role="img" aria-label="{text(label)}"></canvas>'
    f'<p class="readout" aria-live="polite"></p></div>'
    f'<p class="note">Rows: the true class. Columns: the predicted one.{note}</p>'
  )
  items = []
  for place, (true, answer, n) in enumerate(largest.tolist()):
    share = n / max(int(e.confusion.counts[true]), 1)
    title = (
      f'<b>{text(_name(run, true))}</b> taken for <b>{text(_name(run, answer))}</b> '
      f'<span>{n:,} · {share:.1%}</span>'
    )
    items.append(
      f'<li><details class="pair" data-place="{place}" data-cell="{true},{answer}">'
      f'<summary>{title}</summary><div class="thumbnails"></div></details></li>'
    )
  if items:
    body += (
      '<h4>Largest confusions</h4>'
      f'<ol class="pairs" data-evaluation="{key}">{"".join(items)}</ol>'
    )
  else:
    body += '<p>No classes are confused.</p>'
  rows = []
  for c in e.confusion.worst().tolist():
    n, right = int(e.confusion.counts[c]), int(e.confusion.right[c])
    rows.append(
      (
        _name(run, c),
        f'{n:,}',
        f'{right / n:.1%}',
        f'{int(e.confusion.predicted[c]):,}',
      )
    )
  head = ('class', 'examples', 'right', 'predicted')
  worst = table(head, rows, 'Classes of lowest accuracy')
  return body + details('Classes of lowest accuracy', worst)


def _calibration(e: Evaluation) -> str:
  found = e.calibration
  if found is None:
    return '<h3>Calibration</h3><p class="note">No probability is finite.</p>'
  excess = found.mean_confidence - found.mean_accuracy
  rows = [
    (f'{low:.0%} to {high:.0%}', f'{n:,}', f'{sure:.1%}', f'{right:.1%}')
    for low, high, n, sure, right in zip(
      *(found.edges[:-1], found.edges[1:], found.counts),
      *(found.confidence, found.accuracy),
      strict=True,
    )
    if n
  ]
  head = ('confidence', 'examples', 'mean confidence', 'accuracy')
  return (
    f'<h3>Calibration</h3><div class="beside">{reliability.diagram(found)}'
    + pairs(
      [
        ('expected calibration error', f'{found.ece:.2%}'),
        ('mean confidence', f'{found.mean_confidence:.2%}'),
        ('accuracy', f'{found.mean_accuracy:.2%}'),
        (f'{"over" if excess > 0 else "under"}confident by', f'{abs(excess):.2%}'),
      ]
    )
    + f'</div>{details("Numbers by confidence", table(head, rows, "Calibration"))}'
  )


def _mistakes(run: Run, e: Evaluation, key: str) -> str:
  if not e.mistakes:
    none = 'There are none.' if e.calibration else 'No probability is finite.'
    return f'<h3>Most confident mistakes</h3><p>{none}</p>'
  control = ''
  if any(m.attention for m in e.mistakes):
    control = (
      f'<label><input type="checkbox" class="attention" data-evaluation="{key}" checked>'
      ' Show where the model looked: the rest is dark</label>'
    )
  cards = ''.join(_card(run, m) for m in e.mistakes)
  return (
    f'<h3>Most confident mistakes</h3>{control}'
    f'<ul class="mistakes" data-evaluation="{key}">{cards}</ul>'
  )


def _card(run: Run, m: Mistake) -> str:
  true = _name(run, m.label) if m.label >= 0 else 'several labels'
  picture = '<div class="nothing">no picture</div>'
  if m.picture:
    alt = text(f'{true}, taken for {_name(run, m.top[0])}')
    picture = f'<img src="{m.picture}" alt="{alt}">'
    if m.attention:
      picture += f'<img class="overlay" src="{m.attention}" alt="">'
  rows = ''.join(
    f'<li><meter min="0" max="1" value="{p:.4f}" aria-hidden="true"></meter> '
    f'<span title="{text(_name(run, c))}">{text(_name(run, c))}</span> {p:.1%}</li>'
    for c, p in zip(m.top, m.probability, strict=True)
  )
  return (
    f'<li><div class="picture">{picture}</div><p>is <b>{text(true)}</b></p>'
    f'<ol class="answers">{rows}</ol><p class="path">{text(m.name)}</p></li>'
  )
