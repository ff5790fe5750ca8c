"""The page that a finished run writes by itself."""

import time

import jax

from vit_jax import buckets, distributed
from vit_jax.tools.report import folder, page
from vit_jax.tools.report.address import FILE, address
from vit_jax.train import disk

# Seconds for pictures, beside those of the numbers.
_SECONDS = 5
# Models of more parameters would be read and compiled for longer than a run should wait.
_MOST_PARAMETERS = 100_000_000


def write(workdir: str, status: dict) -> str | None:
  """Writes the page of a run into its folder; returns its address.

  None, and one line on stderr, if that fails in any way: the run itself is done. Of
  several processes the first does, alone.

  Args:
    status: what the run returned.
  """
  if not distributed.is_first():
    return None
  try:
    # Reading a checkpoint takes all processes, and from a bucket its time.
    attention = jax.process_count() == 1 and not buckets.is_url(workdir)
    attention &= status.get('trained_parameters', 0) <= _MOST_PARAMETERS
    html, _ = page.render(
      folder.read([workdir]), time.monotonic() + _SECONDS, attention
    )
    path = buckets.path(workdir) / FILE
    disk.replace(path, html.encode())
  except (Exception, KeyboardInterrupt) as error:
    why = ' '.join(str(error).split())[:200] or type(error).__name__
    distributed.say(
      f'warning: the page of the run was not written ({why}); vit_jax report {workdir} '
      'tries again.'
    )
    return None
  return address(path)
