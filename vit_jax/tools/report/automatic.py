"""The page that a finished run writes by itself."""

import jax

from vit_jax import distributed, files
from vit_jax.tools.report import folder, page
from vit_jax.tools.report.address import FILE, address

# Reading and compiling a larger model takes longer than a run should wait for its page.
_MOST_PARAMETERS = 100_000_000


def write(workdir: str) -> str | None:
  """Writes the page of a run into its folder; returns its address.

  If that fails in any way, it prints one line on stderr and returns None: the run itself
  has succeeded. Of several processes only the first writes it.
  """
  if not distributed.is_first():
    return None
  try:
    (run,) = folder.read([workdir])
    html, _ = page.render([run], attended=1 if _is_quick(run) else 0)
    path = files.path(workdir) / FILE
    files.replace(path, html.encode())
  except (Exception, KeyboardInterrupt) as error:
    why = ' '.join(str(error).split())[:200] or type(error).__name__
    distributed.say(
      f'warning: the page of the run was not written ({why}); vit_jax report {workdir} '
      'tries again.'
    )
    return None
  return address(path)


def _is_quick(run: folder.Run) -> bool:
  """Whether the run's checkpoint can be read and its model compiled in a few seconds."""
  # A checkpoint is read by all processes together, and slowly from a bucket.
  if jax.process_count() > 1 or files.is_url(run.path) or not run.starts:
    return False
  return sum(run.starts[-1]['parameters']['parts'].values()) <= _MOST_PARAMETERS
