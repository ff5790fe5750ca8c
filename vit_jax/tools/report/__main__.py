"""Writes a page about a run, or about several runs side by side.

  vit_jax report RUN [RUN...] [--out FILE.html] [--open]

RUN is the folder of a run, finished or not. The page is one HTML file that needs no other
file and no server. It has results and their spread, curves, confused classes, calibration,
the most confident mistakes and where the model looked, images that could not be read,
parameters, the machine, and the command. A run writes its page when it finishes, unless
`--config.log.report=False`.
"""

import contextlib
import sys
import tempfile
import webbrowser
from pathlib import Path

from vit_jax import cli, files, terminal
from vit_jax.errors import UserError
from vit_jax.tools.report.address import FILE, address


def main(argv: list[str]) -> int:
  """Writes the page and says where it is."""
  parser = cli.Parser('vit_jax report', description=__doc__.split('\n')[0])
  parser.add_argument('runs', metavar='RUN', nargs='+', help="a run's folder")
  parser.add_argument(
    '--out',
    metavar='FILE.html',
    help=f'default: {FILE} in the folder of the run; of several, beside the first',
  )
  parser.add_argument('--open', action='store_true', help='show it in the browser')
  cli.add_json_option(parser)
  args = parser.parse_args(argv)
  if args.open and not args.out and files.is_url(args.runs[0]):
    raise UserError('--open shows a file on disk: --out FILE.html names one.')
  out = files.path(args.out or _default(args.runs))
  # A run that is not there is refused below.
  if not files.is_url(out) and (out.is_dir() or (args.out and not out.parent.is_dir())):
    raise UserError(f'{out}: expected a file in a folder that exists.')

  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix='vit_jax-'))
    stack.enter_context(terminal.noise_to(Path(folder) / 'report.txt'))
    from vit_jax.tools.report import folder as folders
    from vit_jax.tools.report import page

    html, left_out = page.render(folders.read(args.runs))
    try:
      files.replace(out, html.encode())
    except PermissionError as error:
      raise UserError(f'{out}: {error.strerror}. --out names another file.') from None
  if args.json:
    cli.print_json(
      {'page': str(out), 'bytes': len(html.encode()), 'left_out': left_out}
    )
  else:
    print(f'{address(out)}   {len(html.encode()) / 1e6:.1f} MB')
    for line in left_out:
      print(f'  left out: {line}')
  if args.open:
    webbrowser.open(address(out))
  return 0


def _default(runs: list[str]) -> str:
  folder = files.path(runs[0])
  return str((folder if len(runs) == 1 else folder.parent) / FILE)


if __name__ == '__main__':
  sys.exit(cli.run(main))
