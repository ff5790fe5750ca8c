"""`tools.bench --tpu`: what a step costs on a TPU, by the compiler, part by part."""

from vit_jax import cli
from vit_jax.tools.bench import ahead, text
from vit_jax.tools.tpu import cost, schedules, topology
from vit_jax.tools.tpu.generations import GENERATIONS, parse

LEFT_OUT = 'not in it: collectives, the host and its input, waiting for other devices'


def about(name: str, model, mode: str) -> dict:
  """Returns whether XLA's estimates reach the vendor's rate."""
  return {'calibrated': _generation(name).calibrated}


def measure(lowered, name: str, model, mode: str, batch: int) -> dict:
  """Returns `cost.measure` of a lowered step, with step_s, mfu and images_per_s_chip."""
  generation = _generation(name)
  program = cli.interruptible(lowered.compile, schedules.forget)
  found = cost.measure(program, generation)
  seconds = found['cycles'] / generation.clock
  passes = model.passes(mode)
  rate = found['cycles'] * generation.ops_per_cycle
  return found | {
    'mfu': passes and passes * model.flops * batch / rate,
    'step_s': seconds,
    'images_per_s_chip': batch / seconds * generation.devices,
  }


def _generation(name: str):
  return GENERATIONS[parse(name)[0]]


def line(row: dict) -> str:
  """Returns a row in one line: its cycles."""
  return f'{row["cycles"] / 1e6:.2f} M cycles'


def table(result: dict) -> str:
  """Returns what the tool prints of a record."""
  rows = result['rows']
  lines = [
    *ahead.head(result, "one device, by XLA's cost model"),
    *ahead.body(rows, 'tpu', _COLUMNS, _numbers, _ratio),
  ]
  for row in rows:
    lines += ['', *_parts(row)]
  guessed = sorted(
    {row['tpu'].partition(':')[0] for row in rows if not row['calibrated']}
  )
  lines += ['', LEFT_OUT[0].upper() + LEFT_OUT[1:] + '.']
  if guessed:
    lines.append(
      f"MFU and images/s of {', '.join(guessed)} are by the vendor's rate, which XLA's "
      'estimate of a large product does not reach.'
    )
  lines.append(
    'in all: memory allocated, temporaries among it; accessed: what operations read and '
    'write, on chip too.'
  )
  return '\n'.join(lines)


_COLUMNS = f'{"M cycles":>10}{"MFU":>7}{"images/s/chip":>15}'
_COLUMNS += f'{"temp":>10}{"in all":>10}{"accessed":>10}'


def _numbers(row: dict, side: dict) -> str:
  accessed = f'{side["bytes_accessed"] / 1e9:7.1f} GB' if side['bytes_accessed'] else ''
  return (
    f'{side["cycles"] / 1e6:10.2f}{text.share(side["mfu"])}{side["images_per_s_chip"]:15,.0f}'
    f'{ahead.gib(side, "temp_bytes")}{ahead.gib(side, "bytes")}{accessed:>10}'
  )


def _ratio(ratio: dict) -> str:
  return f'{ratio["cycles"]:10.3f}{"":22}{ratio["temp_bytes"]:10.3f}'


def _parts(row: dict) -> list[str]:
  """Returns the lines of where cycles go, beside the other side's where there is one."""
  sides = [row['parts'], *([row['vs']['parts']] if 'vs' in row else [])]
  names = [(p, part) for p in cost.PASSES for part in sides[0].get(p, {})]
  names += [
    (p, part)
    for side in sides[1:]
    for p in cost.PASSES
    for part in side.get(p, {})
    if (p, part) not in names
  ]
  names.sort(key=lambda name: cost.PASSES.index(name[0]))
  heads = ['M cycles', *(['big_vision'] if len(sides) > 1 else [])]
  lines = [f'{row["tpu"]} {row["mode"]:21}' + ''.join(f'{head:>12}' for head in heads)]
  for which, part in names:
    cycles = [side.get(which, {}).get(part, 0) / 1e6 for side in sides]
    if max(cycles) >= 0.001 * row['cycles'] / 1e6:
      lines.append(f'  {which:10}{part:16}' + ''.join(f'{c:12.2f}' for c in cycles))
  if estimated := sum(found['cycles'] for found in row['uncosted']):
    lines.append(f'  of which estimated here, not by XLA: {estimated / 1e6:.2f}')
    for found in row['uncosted'][:5]:
      if found['cycles'] >= 0.001 * row['cycles']:
        lines.append(
          f'    {found["cycles"] / 1e6:6.2f}  {found["times"]} x {found["op"]}'
        )
  if row['unknown_loops']:
    lines.append(f'  loops of unknown length, counted once: {row["unknown_loops"]}')
  if beside := sum(found['cycles'] for found in row['overlapped'].values()):
    lines.append(f'  copies beside the rest, not in the sum: {beside / 1e6:.2f}')
  return lines


TARGET = ahead.Target(
  flag='tpu',
  topology=topology,
  left_out=LEFT_OUT,
  ratios=('cycles', 'temp_bytes'),
  about=about,
  measure=measure,
  line=line,
  table=table,
)
