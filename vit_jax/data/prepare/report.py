"""Counts per class and of what was left out: kept while reading, written beside the data.

A `Tally` is a plain sum, so that parts read by many workers add up, and one stored in
JSON survives an interruption.
"""

import json
import statistics
from collections import Counter

from vit_jax.data.prepare import features
from vit_jax.data.prepare.plan import Outcome

# Of what is left out, this many are named; all are counted.
MAX_NAMED = 10_000
_NAMED_IN_TEXT = 10


class Tally:
  """What a preparation has met so far.

  Attributes:
    classes: every class met, with images or without.
    counts: {split: {class: images}}; an image with several labels counts in each.
    examples, size: {split: images}, {split: bytes of their files}.
    changed: {'turned': images, 'converted': images, 'shrunk': images}.
    left: {'broken': number, 'skipped': number}; named: {kind: [{path, reason}]}.
  """

  def __init__(self, state: dict | None = None):
    state = state or {}
    self.classes = set(state.get('classes', ()))
    self.counts = {k: Counter(v) for k, v in state.get('counts', {}).items()}
    self.examples = Counter(state.get('examples'))
    self.size = Counter(state.get('size'))
    self.changed = Counter(state.get('changed'))
    self.left = Counter(state.get('left'))
    self.named = {k: list(v) for k, v in state.get('named', {}).items()}

  def state(self) -> dict:
    """Returns what `Tally(state)` takes, for JSON."""
    return {**vars(self), 'classes': sorted(self.classes)}

  def add(self, outcome: Outcome) -> None:
    if outcome.place is not None:
      self.classes.update(outcome.place.labels)
    if outcome.kind == 'kept':
      self._count(outcome.place.split, outcome.place.labels, len(outcome.data), 1)
      self.changed.update(outcome.note.split())
    elif outcome.kind != 'class':
      self.leave(outcome.kind, outcome.path, outcome.note)

  def take_back(self, split: str, labels, size: int, path: str, reason: str) -> None:
    """Counts an image that was kept as skipped after all."""
    self._count(split, labels, -size, -1)
    self.leave('skipped', path, reason)

  def leave(self, kind: str, path: str, reason: str) -> None:
    self.left[kind] += 1
    named = self.named.setdefault(kind, [])
    if len(named) < MAX_NAMED:
      named.append({'path': path, 'reason': reason})

  def merge(self, other: 'Tally') -> 'Tally':
    """Adds another's counts to this one's, and returns it."""
    self.classes |= other.classes
    for split, counts in other.counts.items():
      self.counts.setdefault(split, Counter()).update(counts)
    for mine, its in (
      (self.examples, other.examples),
      (self.size, other.size),
      (self.changed, other.changed),
      (self.left, other.left),
    ):
      mine.update(its)
    for kind, named in other.named.items():
      self.named[kind] = (self.named.get(kind, []) + named)[:MAX_NAMED]
    return self

  def _count(self, split: str, labels, size: int, number: int) -> None:
    self.examples[split] += number
    self.size[split] += size
    counts = self.counts.setdefault(split, Counter())
    for label in labels:
      counts[label] += number


def make(tally: Tally, name: str, version: str, class_names: tuple[str, ...]) -> dict:
  """Returns the report.

  'splits' holds for each split: examples, bytes, images per class ('min', 'median',
  'max'), the classes with none ('none'), and all 'counts' in the order of the classes.
  """
  splits = {}
  for split in sorted(tally.examples):
    counts = {label: tally.counts[split].get(label, 0) for label in class_names}
    values = list(counts.values())
    splits[split] = {
      'examples': tally.examples[split],
      'bytes': tally.size[split],
      'min': min(values),
      'median': statistics.median_low(values),
      'max': max(values),
      'none': [label for label, count in counts.items() if not count],
      'counts': counts,
    }
  return {
    'name': name,
    'version': version,
    'num_classes': len(class_names),
    'splits': splits,
    'turned': tally.changed['turned'],
    'converted': tally.changed['converted'],
    'shrunk': tally.changed['shrunk'],
    **{
      kind: {
        'number': tally.left[kind],
        # Sorted, because the order in which a cluster meets them is chance.
        'files': sorted(tally.named.get(kind, []), key=lambda f: f['path']),
      }
      for kind in ('broken', 'skipped')
    },
  }


def text(report: dict) -> str:
  """Returns the report for people, with all counts at its end."""
  lines = [summary(report)]
  for split, record in report['splits'].items():
    lines += ['', f'{split}: images per class']
    lines += [f'{count:>10,}  {label}' for label, count in record['counts'].items()]
  return '\n'.join(lines) + '\n'


def summary(report: dict) -> str:
  """Returns the report for people, without the counts of single classes."""
  lines = [f'{report["name"]} {report["version"]}: {report["num_classes"]:,} classes']
  for split, record in report['splits'].items():
    lines.append(
      f'  {split}: {record["examples"]:,} images, {_size(record["bytes"])}; per class '
      f'min {record["min"]:,}, median {record["median"]:,}, max {record["max"]:,}'
    )
    if record['none']:
      lines.append(
        f'    classes with none: {_some(record["none"], len(record["none"]))}'
      )
  if report['turned']:
    lines.append(f'  with their EXIF orientation applied: {report["turned"]:,}')
  if report['converted']:
    lines.append(f'  converted to PNG: {report["converted"]:,}')
  if report['shrunk']:
    lines.append(f'  made smaller: {report["shrunk"]:,}')
  kinds = {'broken': 'broken, left out', 'skipped': 'no part of the data set, left out'}
  for kind, words in kinds.items():
    if number := report[kind]['number']:
      files = [f'{f["path"]} ({f["reason"]})' for f in report[kind]['files']]
      lines.append(f'  {words}: {_some(files, number)}')
  return '\n'.join(lines)


def write(report: dict, directory: str) -> list[str]:
  """Writes report.json and report.txt, and returns their paths."""
  path = features.load_tfds().core.Path(directory)  # local, or in a bucket
  out = []
  for name, content in (
    ('report.json', json.dumps(report, indent=1) + '\n'),
    ('report.txt', text(report)),
  ):
    (path / name).write_text(content)
    out.append(str(path / name))
  return out


def _some(names: list[str], number: int) -> str:
  more = f' and {number - _NAMED_IN_TEXT:,} more' if number > _NAMED_IN_TEXT else ''
  return f'{number:,}: {", ".join(names[:_NAMED_IN_TEXT])}{more}'


def _size(size: int) -> str:
  for unit, scale in (('GB', 1e9), ('MB', 1e6)):
    if size >= scale:
      return f'{size / scale:,.1f} {unit}'
  return f'{size / 1e3:,.1f} kB'
