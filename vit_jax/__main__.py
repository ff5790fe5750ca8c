"""vit_jax COMMAND ...: training and all tools under one name.

A command runs its module as `python -m` would, and imports it only then.
"""

import platform
import runpy
import sys
from pathlib import Path

from vit_jax import cli
from vit_jax.errors import choose
from vit_jax.registry import Registry
from vit_jax.version import __version__

# Command -> (module, help).
COMMANDS = Registry(
  'command',
  {
    'train': ('vit_jax.main', 'trains and evaluates a model'),
    'sample': ('vit_jax.tools.sample', 'writes a photograph and a small trained model'),
    'predict': ('vit_jax.tools.predict', 'classifies images, or finds objects in them'),
    'embed': ('vit_jax.tools.embed', 'writes the features of images to a file'),
    'search': ('vit_jax.tools.search', 'finds similar images by their features'),
    'evaluate': ('vit_jax.tools.evaluate', 'measures weights on a data set'),
    'convert': ('vit_jax.tools.convert', "writes weights in another library's format"),
    'push': ('vit_jax.tools.push', 'uploads a model with its card to the hub'),
    'export': (
      'vit_jax.tools.export',
      'writes a program that runs without this library',
    ),
    'prepare': ('vit_jax.tools.prepare', 'writes a data set from archives or folders'),
    'inspect': ('vit_jax.tools.inspect', 'describes a model, a file or a run'),
    'figures': (
      'vit_jax.tools.figures',
      'draws attention, filters, positions and results',
    ),
    'report': ('vit_jax.tools.report', 'writes a page about runs'),
    'bench': ('vit_jax.tools.bench', 'measures the speed of a model'),
    'doctor': ('vit_jax.tools.doctor', 'lists installed packages, and trains one step'),
  },
)


def main(argv: list[str] | None = None) -> int:
  """Runs `vit_jax COMMAND ...`; returns the exit code of the command, or exits with it."""
  return cli.run(_dispatch, argv)


def _dispatch(argv: list[str]) -> int:
  if not argv or argv[0] in ('-h', '--help', 'help'):
    print('usage: vit_jax COMMAND [ARGUMENTS], vit_jax COMMAND --help, vit_jax --version\n',
          *(f'  {name:10} {text}' for name, (_, text) in COMMANDS.items()),
          sep='\n', file=sys.stdout if argv else sys.stderr)  # fmt: skip
    return 0 if argv else 2
  if argv[0] == '--version':
    package = Path(__file__).parent
    print(f'vit_jax {__version__} from {package} (Python {platform.python_version()})')
    return 0
  module, _ = choose('command', argv[0], COMMANDS.data)
  sys.argv[1:] = argv[1:]
  runpy.run_module(module, run_name='__main__', alter_sys=True)
  raise AssertionError(f'{module} did not end with sys.exit')


if __name__ == '__main__':
  sys.exit(main())
