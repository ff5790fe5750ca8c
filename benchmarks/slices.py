"""Compiles configs for the smallest TPU slices that their docstrings say they fit on.

  .venv-tpu/bin/python benchmarks/slices.py               # or: make slices; hours
  .venv-tpu/bin/python benchmarks/slices.py vit_b16 digits

A config's docstring says `Smallest slices: v3:4x4 or v5e:4x4`, chips as their mesh. Each
is compiled by `tools.inspect --config C --tpu SLICE`, with the dtype, mesh, remat and scan
of the recipe: a program that does not fit is refused. What it says is kept
in benchmarks/slices.json and shown in benchmarks/SLICES.md. Ends 1 where a config does not
fit, or is not refused on the next smaller slice. Variants whose cost a paper gives are
compiled as well.
"""

import argparse
import ast
import datetime
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
KEPT, SHOWN = ROOT / 'benchmarks/slices.json', ROOT / 'benchmarks/SLICES.md'
SAID = re.compile(r'Smallest slices: (v3:\d+x\d+) or (v5e:\d+x\d+)')
# Slices of up to 128 chips that the vendor offers and that can be compiled for.
OFFERED = {
  'v3': ('2x2', '4x4', '8x8'),
  'v5e': ('2x2', '2x4', '4x4', '4x8', '8x8', '8x16'),
}
# What a config leaves to its user.
MORE = {
  'finetune': ('weights=b16-i21k,data=cifar10', []),
  'folder': ('', ['--examples', '10000', '--config.model.num_classes=100']),
}
# {config: {arguments: slices}}: besides, what a paper gives the cost of.
VARIANTS = {
  'vit_jft': {
    'variant=L/16,epochs=14': ('v3:4x4', 'v5e:4x4'),
    'variant=H/14': ('v3:8x8', 'v5e:8x8'),
  },
}
# Of `tools.inspect --json`, kept.
FIELDS = ('model', 'batch_size', 'devices', 'mesh', 'hbm', 'bytes', 'temp_bytes')
FIELDS += ('cycles', 'mfu', 'images_per_s', 'hours', 'core_days', 'paper')


def slices(config: pathlib.Path) -> tuple[str, ...]:
  """Returns the slices that a config's docstring names; () if it names none."""
  text = ast.get_docstring(ast.parse(config.read_text(encoding='utf-8')))
  said = SAID.search(' '.join(text.split()))
  return said.groups() if said else ()


def smaller(slice_: str) -> str | None:
  """Returns the next smaller slice, 'v5e:2x2' of 'v5e:2x4'; None of the smallest."""
  generation, shape = slice_.split(':')
  below = OFFERED[generation].index(shape)
  return f'{generation}:{OFFERED[generation][below - 1]}' if below else None


def measure(name: str, slice_: str, variant: str = '') -> dict:
  """Returns what `tools.inspect --tpu` says of a config; {'error': text} if it refuses."""
  more, flags = MORE.get(name, ('', []))
  arguments = ','.join(filter(None, (more, variant)))
  config = f'configs/{name}.py' + (f':{arguments}' if arguments else '')
  command = ['-m', 'vit_jax.tools.inspect', '--config', config, '--tpu', slice_]
  done = subprocess.run(
    [sys.executable, *command, *flags, '--json'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  if done.returncode:
    return {'error': done.stderr.strip().splitlines()[-1]}
  record = json.loads(done.stdout)
  found = {**record, **record['tpu']}
  made = datetime.datetime.now(datetime.UTC).date().isoformat()
  return {key: found[key] for key in FIELDS} | {'made': made}


def table(kept: dict) -> str:
  """Returns Markdown of {config: {slice: measure}}."""
  lines = [
    '# The smallest slices',
    '',
    'What each config needs, as `python -m vit_jax.tools.inspect --config C --tpu SLICE` says:',
    'memory is what the compiler allocates, time is its cost model at the clock of the',
    "vendor's peak, without input and interconnect. Nothing was run on a TPU. A device is a",
    'core of a v3 or a chip of a v5e; core-days are of the whole run, on a v5e chip-days.',
    "Slices are chips along each axis, two cores a chip on v3: v3:2x2 is gcloud's v3-8, v5e:2x4",
    'its v5litepod-8. Asked were, of up to 128 chips, '
    + '; '.join(f'{name} {", ".join(shapes)}' for name, shapes in OFFERED.items())
    + '.',
    'Where the next smaller slice is named as refused, the step did not fit on it; elsewhere',
    'there is none, or it has not been asked. Written by `make slices`, with '
    + ' and '.join(
      f'`{" ".join(flags)}` for {name}' for name, (_, flags) in MORE.items() if flags
    )
    + '.',
    '',
    '| config | model | images a step | slice | refused | devices | GiB a device | MFU | images/s | core-days | paper | made |',
    '|---|---|--:|---|---|--:|--:|--:|--:|--:|--:|---|',
  ]
  for name, rows in sorted(kept.items()):
    for slice_, row in rows.items():
      gib = f'{row["bytes"] / 2**30:.1f} of {row["hbm"] / 2**30:.0f}'
      lines.append(
        f'| {name} | {row["model"]} | {row["batch_size"]:,} | {slice_} '
        f'| {row.get("refused", "")} | {row["devices"]} | {gib} '
        f'| {row["mfu"]:.0%} | {row["images_per_s"]:,.0f} | {row["core_days"]:,.3g} | {row["paper"] or ""} | {row["made"]} |'
      )
  return '\n'.join(lines) + '\n'


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('configs', nargs='*', metavar='CONFIG', help='default: all')
  wanted = parser.parse_args().configs
  kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
  wrong = 0
  for path in sorted((ROOT / 'configs').glob('*.py')):
    if wanted and path.stem not in wanted:
      continue
    for variant, named in {'': slices(path), **VARIANTS.get(path.stem, {})}.items():
      name = f'{path.stem}:{variant}' if variant else path.stem
      rows = {}
      for slice_ in named:
        row = measure(path.stem, slice_, variant)
        print(f'{name} on {slice_}: {row.get("error", "fits")}', flush=True)
        if 'error' in row:
          wrong += 1
          continue
        rows[slice_] = row
        if less := smaller(slice_):
          error = measure(path.stem, less, variant).get('error', 'fits')
          if 'does not fit' in error:
            row['refused'] = less
          else:
            print(f'{name} on {less}: {error}; expected not to fit', flush=True)
            wrong += 1
      kept = {**kept, name: rows} if rows else kept
      KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + '\n')
      SHOWN.write_text(table(kept))
  return int(wrong > 0)


if __name__ == '__main__':
  sys.exit(main())
