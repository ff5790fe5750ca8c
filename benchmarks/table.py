"""Writes the tables of docs/speed.md from benchmarks/results/*.json.

  python benchmarks/table.py [--check] [--page docs/speed.md] [--results FOLDER]

They stand between the two comments `<!-- benchmarks -->` and `<!-- /benchmarks -->`.
`--check` changes nothing and exits with 1 where the page is not what the results say.

The results are of CPUs so far: the code chooses cuDNN's attention on a GPU and runs on
a TPU unchanged, but neither has been measured. To add a machine, run there

  python -m vit_jax.tools.bench vit:B/16 --vs timm --out benchmarks/results/NAME.json

and this script. Of several results of one machine, model, mode and size the newest is
shown, of several batch sizes the best.
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BEGIN, END = '<!-- benchmarks -->', '<!-- /benchmarks -->'


def load(folder: pathlib.Path) -> list[dict]:
  """Returns the records (see `vit_jax.tools.bench.record`), oldest first."""
  texts = [path.read_text(encoding='utf-8') for path in sorted(folder.glob('*.json'))]
  return sorted(map(json.loads, texts), key=lambda record: record['date'])


def render(records: list[dict]) -> str:
  """Returns Markdown: the models' table, the input pipelines', where they are from."""
  parts = [_models(records), _pipelines(records)]
  notes = {_where(record): None for record in records}
  notes = [f'{i}. {note}' for i, note in enumerate(notes, 1)]
  return '\n\n'.join(filter(None, [*parts, '\n'.join(notes)]))


def _where(record: dict) -> str:
  versions = record['versions']
  packages = [p for p in ('jax', 'tensorflow', 'torch', 'timm') if p in versions]
  return (
    f'{_device(record)}, {record["date"][:10]}: '
    + ', '.join(f'{package} {versions[package]}' for package in packages)
    + f'; load before: {record["machine"]["load"]}. `{record["command"]}`'
  )


def _device(record: dict) -> str:
  machine = record['machine']
  if machine['platform'] != 'cpu':
    return machine['device']
  cores = machine['cores']
  return f'{machine["device"]}, {cores} core{"s" * (cores > 1)}'


def _newest(records: list[dict], tool: str, keys: tuple[str, ...]):
  """Yields (note's number, record, row), the last row of each setting."""
  notes = list(dict.fromkeys(map(_where, records)))
  rows = {}
  for record in records:
    if record['tool'] != tool:
      continue
    for row in record['rows']:
      if row.get('error') or not row.get('best', True):
        continue
      key = (_device(record), *(str(row[k]) for k in keys))
      rows[key] = notes.index(_where(record)) + 1, record, row
  return rows.values()


def _models(records: list[dict]) -> str:
  keys = ('model', 'set', 'mode', 'dtype', 'resolution')
  lines = []
  for note, record, row in _newest(records, 'bench', keys):
    model = ', '.join([f'`{row["model"]}`', *row['set']])
    timm = row.get('timm') or {}
    beside = [timm.get(key) for key in ('images_per_s', 'ratio', 'cpu_ratio')]
    rate, ratio, cpu = (_number(x) for x in beside)
    if record['machine']['platform'] != 'cpu':
      cpu = ''  # a GPU's host mostly waits
    lines.append(
      f'| {model} | {row["mode"]} | {row["dtype"]} | {row["batch"]} | '
      f'{row["resolution"]} | {_number(row["images_per_s"])} | {row["mfu"]:.0%} | '
      f'{rate} | {ratio} | {cpu} | {note} |'
    )
  if not lines:
    return ''
  return '\n'.join(
    [
      '| model | mode | dtype | batch | px | images/s | MFU | timm | ours / timm '
      '| by CPU time | note |',
      '|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|',
      *lines,
    ]
  )


def _pipelines(records: list[dict]) -> str:
  lines = [
    f'| {row["mode"]} | `{_cell(row["pp"])}` | {_number(row["images_per_s_per_core"])} | '
    f'{_number(row["torchvision"]["images_per_s_per_core"])} | '
    f'{_number(row["torchvision"]["ratio"])} | '
    f'{_number(row["torchvision"]["cpu_ratio"])} | {note} |'
    for note, _, row in _newest(records, 'input_pipeline', ('mode', 'pp'))
  ]
  if not lines:
    return ''
  return '\n'.join(
    [
      '| input | preprocessing | images/s per core | torchvision | ours / torchvision '
      '| by CPU time | note |',
      '|---|---|--:|--:|--:|--:|--:|',
      *lines,
    ]
  )


def _cell(text: str) -> str:
  """Returns text whose '|' do not end a cell, not even in code."""
  return text.replace('|', r'\|')


def _number(value: float | None) -> str:
  """Returns three digits, more of a large whole number."""
  if value is None:
    return ''
  return f'{value:,.0f}' if value >= 100 else f'{value:.3g}'


def updated(page: str, table: str) -> str:
  """Returns the page's text with the table between the comments.

  Raises:
    SystemExit: if it has not each of them once, in this order.
  """
  before, begin, rest = page.partition(BEGIN)
  _, end, after = rest.partition(END)
  if not begin or not end or BEGIN in rest or END in after:
    sys.exit(f'The page needs one line {BEGIN} and, after it, one line {END}.')
  return f'{before}{BEGIN}\n{table}\n{END}{after}'


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--check', action='store_true', help='only compare')
  parser.add_argument('--page', type=pathlib.Path, default=ROOT / 'docs' / 'speed.md')
  parser.add_argument(
    '--results', type=pathlib.Path, default=ROOT / 'benchmarks' / 'results'
  )
  args = parser.parse_args()
  records = load(args.results)
  if not records:
    sys.exit(f'There are no results in {args.results}.')
  old = args.page.read_text(encoding='utf-8')
  new = updated(old, render(records))
  if args.check and new != old:
    print(f'{args.page} is not up to date: run python {pathlib.Path(__file__).name}')
    return 1
  if new != old:
    args.page.write_text(new, encoding='utf-8')
  return 0


if __name__ == '__main__':
  sys.exit(main())
