"""Writes a photograph, a digit and a small trained model, to try the other commands with.

  vit_jax sample [DIR]

photo.jpg is a cat (scikit-image's "chelsea", by Stefan van der Walt, CC0). digits.npz is a
model of `make train`, which tells ten handwritten digits apart, in float16; seven.png is a
digit that it was not trained on.
"""

import sys
from pathlib import Path

from vit_jax import cli, files
from vit_jax.errors import UserError
from vit_jax.tools import out_folder

FOLDER = Path(__file__).parent / 'samples'


def main(argv: list[str]) -> int:
  """Writes the files and prints their names; raises UserError for another file of a name."""
  parser = cli.Parser('vit_jax sample', description=__doc__.split('\n')[0])
  parser.add_argument('folder', metavar='DIR', nargs='?', default='.')
  args = parser.parse_args(argv)
  out_folder.make(out_folder.check_folder(args.folder, 'DIR'), 'DIR')
  folder = Path(args.folder)
  targets = {folder / path.name: path.read_bytes() for path in sorted(FOLDER.iterdir())}
  for target, data in targets.items():
    if target.exists() and target.read_bytes() != data:
      raise UserError(f'{target} exists: name another folder, vit_jax sample DIR.')
  for target, data in targets.items():
    files.replace(target, data)
  names = [*map(str, targets)]
  return cli.show(args, {'files': names}, '\n'.join(names))


if __name__ == '__main__':
  sys.exit(cli.run(main))
