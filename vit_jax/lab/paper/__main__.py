"""Runs the experiments of the ViT paper at a small scale, and writes one page of them.

  vit_jax paper [--out DIR] [--only posemb,head] [--open]

It takes bundled data, and about twenty minutes on two cores; finished runs are only read.
The page, DIR/paper.html, sets claims of the paper beside what was seen at this scale.
"""

import time
import webbrowser
from collections.abc import Callable

from vit_jax import cli

if __name__ == '__main__':
  cli.exit_on_interrupt()  # before the imports, which take a while

from vit_jax.errors import DiskFull, Interrupted, RunError, Stopped, choose
from vit_jax.train import program

FILE = 'paper.html'
NAMES = 'digits, resolution, posemb, head, shape, optimizer, data_size, masked, axial'


def main(argv: list[str]) -> int:
  """Trains, draws and writes the page; returns the exit code."""
  parser = cli.Parser(
    'vit_jax paper',
    description=__doc__.split('\n')[0],
    epilog=__doc__.split('\n\n')[2],
  )
  add = parser.add_argument
  add('--out', metavar='DIR', default='runs/paper', help='default: %(default)s')
  add('--only', metavar='NAME,NAME', help=f'only these experiments, of {NAMES}')
  add('--open', action='store_true', help='show the page in the browser')
  args = parser.parse_args(argv)
  # After the arguments: it takes seconds.
  from vit_jax import files
  from vit_jax.lab.paper import experiments, figures, page
  from vit_jax.lab.paper.seen import Seen
  from vit_jax.tools import out_folder
  from vit_jax.tools.report.address import address

  out = out_folder.check(args.out)
  wanted = list(experiments.EXPERIMENTS)
  if args.only:
    for name in args.only.split(','):
      choose('experiment', name, wanted)
    wanted = [name for name in wanted if name in args.only.split(',')]
  out_folder.make(out)
  seconds: dict[str, float] = {}
  failed: dict[str, RunError] = {}
  for name in wanted:
    print(f'\n== {experiments.shown(name, out)}', flush=True)
    start = time.perf_counter()
    _try(name, lambda name=name: experiments.run(name, out), failed)
    seconds[name] = time.perf_counter() - start
  figures.write_images(out)
  for name in figures.TITLES:
    _try(f'figure {name}', lambda name=name: figures.draw(name, out), failed)
  html = page.render(Seen(out), seconds, {k: str(e) for k, e in failed.items()})
  files.replace(out / FILE, html.encode())
  print(f'\n{address(out / FILE)}   {len(html) / 1e6:.1f} MB', flush=True)
  if args.open:
    webbrowser.open(address(out / FILE))
  return next((error.exit_code for error in failed.values()), 0)


def _try(name: str, do: Callable[[], int], failed: dict[str, RunError]) -> None:
  """Does one thing; the others go on without it, but for a stop or a full disk."""
  from vit_jax import terminal

  try:
    if do():
      raise RunError('some of its cells have no result, as said above')
  except (Stopped, Interrupted, DiskFull):
    raise
  except RunError as error:
    failed[name] = error
    terminal.say(f'error: {name}: {error}')


if __name__ == '__main__':
  program.run_and_exit(main)
