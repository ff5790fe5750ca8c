"""Runs tests where packages are missing: python -m tests.support.without A,B TEST..."""

import inspect
import sys

import pytest


class Missing:
  """A finder in front of all others that knows nothing of these packages."""

  def __init__(self, packages: list[str]):
    self.packages = packages

  def find_spec(self, name, path=None, target=None):
    if any(f'{name}.'.startswith(f'{package}.') for package in self.packages):
      raise ModuleNotFoundError(f'No module named {name!r}', name=name)


# Code that hides the packages named in argv[1], which it removes, from its process.
BLOCK = f"""
import sys
{inspect.getsource(Missing)}
blocked = sys.argv.pop(1).split(',')
sys.meta_path.insert(0, Missing(blocked))
"""


if __name__ == '__main__':
  packages = sys.argv[1].split(',')
  sys.meta_path.insert(0, Missing(packages))
  code = pytest.main(['-q', '-p', 'no:xdist', '-p', 'no:cacheprovider', *sys.argv[2:]])
  assert not [name for name in sys.modules if name.startswith(tuple(packages))]
  sys.exit(code)
