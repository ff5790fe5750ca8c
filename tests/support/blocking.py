"""Code that hides packages from a process, as if they were not installed."""

# Refuses the packages named in argv[1], which it removes.
BLOCK = """
import sys
blocked = sys.argv.pop(1).split(',')
class Refuse:
  def find_spec(self, name, path=None, target=None):
    if name.partition('.')[0] in blocked:
      raise ModuleNotFoundError(f'{name} is blocked by the test', name=name)
sys.meta_path.insert(0, Refuse())
"""
