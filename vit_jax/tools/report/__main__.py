"""Writes a page about a run, or about several runs side by side.

  vit_jax report RUN [RUN...] [--out FILE.html] [--open]

RUN is the folder of a run, finished or not. The page is one HTML file that needs no other
file and no server: results, curves, confused classes, calibration, mistakes and where the
model looked, or boxes and masks beside the truth; the config, the machine, the command. A
run writes its page when it finishes, unless `--config.log.report=False`.
"""

import os
import sys
import webbrowser

from vit_jax import cli, files, terminal
from vit_jax.errors import UserError


def main(argv: list[str]) -> int:
  """Writes the page and prints its address."""
  parser = cli.Parser('vit_jax report', description=__doc__.split('\n')[0])
  add = parser.add_argument
  add('runs', metavar='RUN', nargs='+', help="a run's folder")
  add('--out', metavar='FILE.html', help='default: report.html in or beside the first')
  add('--open', action='store_true', help='show it in the browser')
  args = parser.parse_args(argv)
  if args.open and files.is_url(args.out or args.runs[0]):
    raise UserError('--open shows a file on disk: name one with --out FILE.html.')
  first = files.path(args.runs[0])
  default = (first if len(args.runs) == 1 else first.parent) / 'report.html'
  out = files.path(args.out) if args.out else default
  # Whether the run exists is checked below.
  if not files.is_url(out) and (out.is_dir() or (args.out and not out.parent.is_dir())):
    raise UserError(f'{out}: expected a file in a folder that exists.')

  with terminal.noise_to(os.devnull):
    from vit_jax.tools.report import page
    from vit_jax.tools.report.folder import read

    html, left_out = page.render(read(args.runs))
    try:
      files.replace(out, html.encode())
    except PermissionError as error:
      raise UserError(f'{out}: {error.strerror}. --out names another file.') from None
  if args.json:
    cli.print_json(
      {'page': str(out), 'bytes': len(html.encode()), 'left_out': left_out}
    )
  else:
    print(page.address(out))
    for line in left_out:
      print(f'  left out: {line}')
  if args.open:
    webbrowser.open(page.address(out))
  return 0


if __name__ == '__main__':
  sys.exit(cli.run(main))
