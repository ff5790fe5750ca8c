"""The results of the tasks: a table, a figure, a record."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vit_jax.errors import RunError
from vit_jax.lab import published, scores
from vit_jax.lab.figures import groups
from vit_jax.lab.grid import table
from vit_jax.lab.vtab.benchmarks import VTAB, Benchmark
from vit_jax.tools import out_folder
from vit_jax.tools.figures.drawn import load_plots


class Ended(NamedTuple):
  """The result of a task.

  Attributes:
    accuracies: on the test split, of the runs that are reported, per cent.
    best: the name of the cell that the validation split chose, '' if there was no choice.
    error: why it has no result, or not that of all its runs; None: it has.
    waits: whether other processes are at its runs.
  """

  accuracies: Sequence[float] = ()
  best: str = ''
  error: RunError | None = None
  waits: bool = False

  @property
  def complete(self) -> bool:
    """Whether its accuracy counts."""
    return bool(self.accuracies) and not self.waits


class Results:
  """Collects what the tasks come to, and writes the tables.

  Attributes:
    ended: {name: its result}.
    files: that were written, by their names.
  """

  def __init__(
    self, benchmark: Benchmark, title: str, notes: Sequence[str], wanted, out: Path
  ):
    """Takes what is to be done.

    Args:
      title: of the weights, in table and figure.
      notes: lines below the table.
      wanted: names of the tasks.
    """
    self._benchmark, self._title, self._notes = benchmark, title, notes
    self._wanted, self._out = list(wanted), out
    self.ended: dict[str, Ended] = {}
    self.files: dict[str, Path] = {}

  def add(self, name: str, ended: Ended) -> None:
    """Takes a task, and writes the tables with it."""
    self.ended[name] = ended
    if not any(ended.complete for ended in self.ended.values()):
      return
    out_folder.write_csv(self._path('results.csv'), self._rows())
    out_folder.write_text(self._path('table.md'), self.text())

  def _accuracies(self) -> dict[str, Sequence[float]]:
    """Returns {title of a task: its accuracies}."""
    tasks = self._benchmark.tasks
    return {
      tasks[name].title: self.ended[name].accuracies
      for name in tasks
      if name in self.ended and self.ended[name].complete
    }

  def means(self) -> dict[str, scores.Score]:
    """Returns the mean of all tasks, and of each group that is complete, by title."""
    return scores.of_groups(groups_of(self._benchmark), self._accuracies())

  def _rows(self) -> list[tuple]:
    rows = [('task', 'group', 'accuracy', 'std', 'runs', 'chosen')]
    for name, task in self._benchmark.tasks.items():
      if (ended := self.ended.get(name)) and ended.complete:
        found = groups.summary(ended.accuracies)
        rows.append((task.title, task.group, *found, ended.best))
    for title, (mean, std) in self.means().items():
      rows.append(
        (title, '', f'{mean:.2f}', '' if std is None else f'{std:.2f}', '', '')
      )
    return rows

  def text(self) -> str:
    """Returns the table as Markdown."""
    _, *rows = self._rows()
    shown = lambda row: f'{row[2]} ± {row[3]}' if row[3] else row[2]
    columns = {
      'task': lambda row: row[0],
      'group': lambda row: row[1],
      'test accuracy (%)': shown,
      'runs': lambda row: str(row[4]),
    }
    if any(row[5] for row in rows):
      columns['chosen'] = lambda row: row[5]
    return table.markdown(
      f'{self._benchmark.title}: {self._title}',
      rows,
      columns,
      [*self._notes, *self._remarks()],
    )

  def _remarks(self) -> list[str]:
    found, tasks = self._accuracies(), self._benchmark.tasks
    lines = ['± is the standard deviation over runs; beside a mean, that of the mean.']
    if len(found) < len(tasks):
      several = f', {statistics.fmean(map(statistics.fmean, found.values())):.2f} %,'
      lines.append(
        f'{len(found)} of {len(tasks)} tasks: the plain mean of these'
        f'{several if len(found) > 1 else ""} is not that of {self._benchmark.title}.'
      )
    lines += [
      f'{tasks[name].title}: {ended.error}'
      for name, ended in self.ended.items()
      if ended.error
    ]
    if left := [tasks[n].title for n in self._wanted if n not in self.ended]:
      lines.append(f'Not tried yet: {", ".join(left)}.')
    return lines

  def draw(self) -> None:
    """Writes the figure, ours beside the paper's; UserError without matplotlib."""
    plots = load_plots()
    benchmark = self._benchmark
    tasks = {task.title: task.group.capitalize() for task in benchmark.tasks.values()}
    found, sources = {}, {}
    if benchmark is VTAB:
      found = {
        name: {task: [value] for task, value in zip(tasks, values, strict=True)}
        for name, values in published.TABLE_9.items()
      }
      sources = dict.fromkeys(found, 'ViT paper, Table 9')
    found[self._title] = self._accuracies()
    drawn = groups.draw(tasks, benchmark.mean, found, sources)
    out_folder.write_csv(self._path('figure.csv'), drawn.rows)
    plots.save(drawn.figure, self._path('figure.png'))

  def record(self) -> dict:
    """Returns what --json prints; accuracies in per cent."""
    means, tasks = self.means(), self._benchmark.tasks
    whole = means.pop(self._benchmark.mean, None)
    return {
      'tasks': {
        name: _plain(tasks[name].group, ended)
        for name, ended in self.ended.items()
        if ended.complete
      },
      'groups': {title: score._asdict() for title, score in means.items()},
      'mean': whole and whole._asdict(),
      'failed': {
        name: str(ended.error) for name, ended in self.ended.items() if ended.error
      },
      'files': [str(path) for path in self.files.values()],
    }

  def _path(self, name: str) -> Path:
    return self.files.setdefault(name, self._out / name)


def _plain(group: str, ended: Ended) -> dict:
  several = len(ended.accuracies) > 1
  return {
    'group': group,
    'mean': statistics.fmean(ended.accuracies),
    'std': statistics.stdev(ended.accuracies) if several else None,
    'runs': len(ended.accuracies),
    'chosen': ended.best or None,
  }


def groups_of(benchmark: Benchmark) -> dict[str, list[str]]:
  """Returns {title of a mean: titles of its tasks}, that of all tasks first."""
  tasks: Mapping[str, str] = {
    task.title: task.group.capitalize() for task in benchmark.tasks.values()
  }
  return scores.groups_of(tasks, benchmark.mean)
