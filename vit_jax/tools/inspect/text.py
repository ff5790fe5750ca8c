"""The reports of `tools.inspect` as text."""

_GIB = 2**30
_VERDICTS = {True: 'fits', False: 'does not fit', None: 'too close to tell'}


def model(record: dict) -> str:
  """Returns the record of `inspect.inspect_model` as text."""
  height, width = record['resolution']
  lines = [f'{record["model"]} at {height}x{width} px', '']
  lines += [f'  {name:<34}{size:>15,}' for name, size in record['modules'].items()]
  lines += [f'  {"parameters":<34}{record["params"]:>15,}', '']
  if record['tokens']:
    lines.append(f'  tokens per image          {record["tokens"]:>9,}')
  lines.append(
    f'  forward, per image        {record["gflops"]:>9.2f} GFLOPs '
    '(products only, multiply-add = 2)'
  )
  if record['exaflops'] is not None:
    lines.append(
      f'  training, {record["examples"]:.3g} images'.ljust(28)
      + f'{record["exaflops"]:>9.4g} exaFLOPs (3 x forward)'
    )
  memory = record['memory']
  lines += ['', f'  training memory at batch {memory["batch"]} per device, estimated:']
  labels = {
    'params': 'parameters, float32',
    'gradients': 'gradients, float32',
    'optimizer': 'two Adam moments, float32',
    'activations': 'activations kept for backward',
    'total': 'total',
  }
  lines += [
    f'    {label:<30}{memory[key] / 2**30:>9.3f} GiB' for key, label in labels.items()
  ]
  return '\n'.join(lines)


def mesh(record: dict) -> str:
  """Returns the record of `mesh.inspect` as text: GiB of one device."""
  axes = ', '.join(f'{k}={v}' for k, v in record['mesh'].items() if v > 1) or 'data=1'
  devices, device = record['devices'], record['device']
  lines = [
    f'  {devices} device{"s" * (devices > 1)} ({axes}), sharding {record["sharding"]}, '
    f'{record["optim"]}, compute in {record["dtype"]}',
    f'  batch {record["batch"]:,}: {record["images"]} images for each device at a time',
    '',
    '  Each device holds, in GiB:',
  ]
  labels = {
    'params': 'parameters, float32',
    'optimizer': 'state of the optimizer',
    'ema': 'average of the parameters',
    'gradients': 'gradients, float32',
    'batch': 'batch',
  }
  lines += [
    f'    {label:<32}{device[key] / _GIB:>9.3f}'
    for key, label in labels.items()
    if device[key]
  ]
  fits = record.get('fits', {})
  head = (
    f'    {"remat":<10}{"activations":>12}{"work":>9}{"estimate":>11}{"compiler":>11}'
  )
  lines += ['', f'  and by what is recomputed{", all in all" * bool(fits)}:', '']
  lines.append(head + (f'   of {record["hbm"]:g} GiB' if fits else ''))
  for policy, row in record['remat'].items():
    numbers = (
      f'{row[key] / _GIB:>{width}.2f}'
      for key, width in (
        ('activations', 12),
        ('working', 9),
        ('estimate', 11),
        ('compiled', 11),
      )
    )
    verdict = f'   {_VERDICTS[fits[policy]]}' if fits else ''
    star = '*' if policy == record['remat_asked'] and len(record['remat']) > 1 else ''
    lines.append(f'    {policy + star:<10}' + ''.join(numbers) + verdict)
  lines += ['', *_notes(record)]
  if record.get('first'):
    lines += ['', f'  What to change first: {record["first"]}']
  return '\n'.join(lines)


def _notes(record: dict) -> list[str]:
  blocks = ', blocks scanned' if record['scan'] else ''
  lines = [
    '  Parameters, optimizer and batch are exact. activations: what backward keeps, by',
    '  shapes; work: space for the block at hand; estimate: all of them and gradients.',
    f'  compiler: the train step as XLA plans it for CPUs{blocks}, measured.',
  ]
  if len(record['remat']) > 1:
    lines.append(f'  *: remat={record["remat_asked"]}, as asked or by default.')
  if record['dtype'] != 'float32':
    lines += [
      f'  XLA for CPUs computes {record["dtype"]} in float32: on an accelerator temporary',
      '  memory is down to half of it.',
    ]
  worst = max(record['apart'].values(), default=0) if 'apart' in record else 0
  if worst > 1.5:
    lines += [
      f'  The compiler plans at least {worst:.1f} times the estimate: it does not split',
      '  activations by images over data and fsdp.',
    ]
  lines.append(f'  ({record["seconds"]:.0f} s)')
  return lines


def zoo(entries) -> str:
  """Returns the list of published weights as text."""
  rows = [('name', 'model', 'px', 'classes', 'data', 'format')]
  for e in entries:
    classes = str(e.classes or 'none')
    rows.append((e.name, e.model, str(e.resolution), classes, e.data, e.format))
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  lines = [
    '  '.join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
    for row in rows
  ]
  return '\n'.join(lines) + (
    '\n\nPixels in [-1, 1]; Apache-2.0. --json has the addresses. None of these files '
    'could be\ndownloaded where this list was made; "none": the published head is all '
    'zeros.'
  )
