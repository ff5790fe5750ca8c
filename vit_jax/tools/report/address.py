"""Where a page is, and how a browser opens it."""

from vit_jax import buckets

FILE = 'report.html'


def address(path) -> str:
  """Returns what a browser opens, file://..., or the gs:// address of an object."""
  return str(path) if buckets.is_url(path) else path.absolute().as_uri()
