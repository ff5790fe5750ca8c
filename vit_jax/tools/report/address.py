"""The name of a page's file, and its address for a browser."""

from vit_jax import files

FILE = 'report.html'


def address(path) -> str:
  """Returns the file:// address of a path, or gs:// of an object in a bucket."""
  return str(path) if files.is_url(path) else path.absolute().as_uri()
