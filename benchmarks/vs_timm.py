"""Times a ViT's training step and forward pass here and in timm, on this machine's CPU.

  python benchmarks/vs_timm.py --torch-python PYTHON [--models Ti/16,S/16,B/16]
    [--mode train,forward] [--batch 8] [--cores 2] [--compile] [--json FILE]

PYTHON is the interpreter of an environment with torch and timm (and this file's needs,
numpy, which torch brings). Each framework is one process that lives for the whole
comparison; they take turns of `--steps` steps, A B A B, so that what else the machine
does hits both. The ratio is the median over rounds of the ratio within a round.

Both arms: float32, the same random batch resident in memory, batch 8, 224 px, 1000
classes, no dropout; a training step is forward, softmax cross entropy, backward and
AdamW on every parameter. The clock stops when the last step of a turn is done. timm
runs eagerly with its fused attention and torch's fused AdamW; `--compile` compiles it.
CPU seconds are printed beside wall time: on a machine that others use, they (best with
`--cores 1`, where no thread spins for another) say more than the clock does.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

CLASSES = 1000
SIZE = 224
RATE, DECAY = 1e-3, 0.05
TIMM_NAMES = {'Ti': 'tiny', 'S': 'small', 'M': 'medium', 'B': 'base', 'L': 'large'}


def timm_name(variant: str) -> str:
  """'S/16' -> 'vit_small_patch16_224'."""
  size, patch = variant.split('/')
  return f'vit_{TIMM_NAMES[size]}_patch{patch}_{SIZE}'


def random_batch(batch: int):
  """Returns images float32 [B, 224, 224, 3] in [-1, 1] and labels int64 [B]."""
  import numpy as np

  rng = np.random.default_rng(0)
  images = rng.uniform(-1, 1, (batch, SIZE, SIZE, 3)).astype(np.float32)
  return images, rng.integers(0, CLASSES, batch)


def jax_arm(args):
  """Returns (run, versions, parameters); run(n) does n steps and waits for the last."""
  sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
  import jax
  import jax.numpy as jnp
  import optax

  import vit_jax
  from vit_jax import compilation

  model = vit_jax.create_model('vit', args.model, num_classes=CLASSES)
  images, labels = (jnp.asarray(x) for x in random_batch(args.batch))
  params = jax.jit(model.init)(jax.random.key(0), images)['params']
  count = sum(x.size for x in jax.tree.leaves(params))
  options = compilation.options()  # those of a run
  if args.mode == 'forward':

    @jax.jit
    def forward(params, images):
      return model.apply({'params': params}, images)[0]

    step = forward.lower(params, images).compile(compiler_options=options)

    def run(n):
      for _ in range(n):
        logits = step(params, images)
      logits.block_until_ready()

  else:
    tx = optax.adamw(RATE, weight_decay=DECAY)

    def loss(params, images, labels):
      logits, _ = model.apply({'params': params}, images, train=True)
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      return losses.mean()

    def train(state, images, labels):
      params, opt_state = state
      value, grads = jax.value_and_grad(loss)(params, images, labels)
      updates, opt_state = tx.update(grads, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), value

    state = (params, tx.init(params))
    step = jax.jit(train, donate_argnums=0).lower(state, images, labels)
    step = step.compile(compiler_options=options)

    def run(n):
      nonlocal state
      for _ in range(n):
        state, _ = step(state, images, labels)
      jax.block_until_ready(state)

  versions = {'jax': jax.__version__, 'vit_jax': vit_jax.__version__}
  return run, versions, count


def timm_arm(args):
  """Returns (run, versions, parameters), as `jax_arm`."""
  import torch

  with lenient_torchvision(torch):
    import timm

  torch.manual_seed(0)
  torch.set_num_threads(args.cores)
  model = timm.create_model(timm_name(args.model), num_classes=CLASSES)
  count = sum(p.numel() for p in model.parameters())
  images, labels = random_batch(args.batch)
  images = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
  labels = torch.from_numpy(labels)
  if args.mode == 'forward':
    model.eval()
    call = torch.compile(model) if args.compile else model

    def run(n):
      with torch.inference_mode():
        for _ in range(n):
          call(images)

  else:
    model.train()
    call = torch.compile(model) if args.compile else model
    tx = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    loss = torch.nn.CrossEntropyLoss()

    def run(n):
      for _ in range(n):
        tx.zero_grad(set_to_none=True)
        loss(call(images), labels).backward()
        tx.step()

  versions = {'torch': torch.__version__, 'timm': timm.__version__}
  return run, versions, count


@contextlib.contextmanager
def lenient_torchvision(torch):
  """Lets torchvision's Python import where its compiled operators do not load.

  timm imports torchvision but its ViT uses none of those operators.
  """
  register = torch.library.register_fake

  def lenient(name, *args, **kwargs):
    def decorate(function):
      try:
        return register(name, *args, **kwargs)(function)
      except RuntimeError:
        return function

    return decorate

  torch.library.register_fake = lenient
  try:
    yield
  finally:
    torch.library.register_fake = register


def worker(args):
  """Answers each line `n` on stdin with the seconds that n steps took."""
  if hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: args.cores])
  run, versions, count = (jax_arm if args.worker == 'jax' else timm_arm)(args)
  run(2)
  reply = sys.stdout
  print(json.dumps({'versions': versions, 'parameters': count}), file=reply, flush=True)
  for line in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    run(int(line))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(json.dumps({'wall': wall, 'cpu': cpu}), file=reply, flush=True)


class Arm:
  """A worker process, ready when constructed."""

  def __init__(self, python: str, name: str, model: str, mode: str, args):
    command = [python, __file__, '--worker', name, '--model', model, '--mode', mode]
    command += ['--batch', str(args.batch), '--cores', str(args.cores)]
    command += ['--compile'] * args.compile
    env = {**os.environ, 'OMP_NUM_THREADS': str(args.cores), 'JAX_PLATFORMS': 'cpu'}
    self.process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    self.about = self._reply()

  def turn(self, steps: int) -> dict:
    self.process.stdin.write(f'{steps}\n')
    self.process.stdin.flush()
    return self._reply()

  def _reply(self) -> dict:
    for line in self.process.stdout:
      with contextlib.suppress(json.JSONDecodeError):
        return json.loads(line)
    raise SystemExit(f'A worker ended: {self.process.args}')

  def close(self):
    self.process.stdin.close()
    self.process.wait()


def compare(model: str, mode: str, args) -> dict:
  """Returns images/s of both arms and the ratio ours / timm."""
  ours = Arm(sys.executable, 'jax', model, mode, args)
  timm = Arm(args.torch_python, 'timm', model, mode, args)
  if ours.about['parameters'] != timm.about['parameters']:
    raise SystemExit(f'{model}: not the same model: {ours.about} {timm.about}')
  rounds = []
  for _ in range(args.rounds):
    rounds.append((ours.turn(args.steps), timm.turn(args.steps)))
  ours.close()
  timm.close()
  images = args.batch * args.steps
  row = {'model': model, 'mode': mode}
  for clock in ('wall', 'cpu'):
    a, b = ([pair[i][clock] for pair in rounds] for i in (0, 1))
    row[clock] = {
      'ours_images_per_s': images / statistics.median(a),
      'timm_images_per_s': images / statistics.median(b),
      'ratio': statistics.median(y / x for x, y in zip(a, b, strict=True)),
      'ratio_of_best': min(b) / min(a),
      'ours_s': a,
      'timm_s': b,
    }
  row['versions'] = ours.about['versions'] | timm.about['versions']
  return row


def cpu_model() -> str:
  """Returns the processor's name."""
  with contextlib.suppress(OSError):
    for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines():
      if line.startswith('model name'):
        return line.split(':', 1)[1].strip()
  return platform.processor()


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--models', default='Ti/16,S/16,B/16')
  parser.add_argument('--mode', default='train,forward')
  parser.add_argument('--batch', type=int, default=8)
  parser.add_argument('--cores', type=int, default=os.cpu_count())
  parser.add_argument('--steps', type=int, default=2, help='per turn')
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--torch-python', help='interpreter that has torch and timm')
  parser.add_argument('--compile', action='store_true', help='torch.compile in timm')
  parser.add_argument('--json', help='file for the result')
  parser.add_argument('--worker', choices=['jax', 'timm'], help=argparse.SUPPRESS)
  parser.add_argument('--model', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    return worker(args)
  if not args.torch_python:
    parser.error('--torch-python: an interpreter that has torch and timm is needed')

  result = {
    'command': sys.argv[1:],
    'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'cpu': cpu_model(),
    'cores': args.cores,
    'load_before': os.getloadavg()[0],
    'python': platform.python_version(),
    'batch': args.batch,
    'compiled_timm': args.compile,
    'rows': [],
  }
  print(f'{result["cpu"]}, {args.cores} cores, load {result["load_before"]:.1f}')
  print('model  mode     ours im/s  timm im/s  ratio (best)  CPU-time ratio (best)')
  for model in args.models.split(','):
    for mode in args.mode.split(','):
      row = compare(model, mode, args)
      result['rows'].append(row)
      wall, cpu = row['wall'], row['cpu']
      print(
        f'{model:6} {mode:8} {wall["ours_images_per_s"]:9.2f} '
        f'{wall["timm_images_per_s"]:10.2f}  {wall["ratio"]:5.2f} '
        f'({wall["ratio_of_best"]:.2f})  {cpu["ratio"]:14.2f} '
        f'({cpu["ratio_of_best"]:.2f})',
        flush=True,
      )
  print(' '.join(f'{k} {v}' for k, v in result['rows'][0]['versions'].items()))
  result['load_after'] = os.getloadavg()[0]
  if args.json:
    path = pathlib.Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
  main()
