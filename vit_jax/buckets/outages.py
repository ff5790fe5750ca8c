"""Outages, in the words of the libraries that reach buckets on their own."""

import re

from vit_jax.errors import NotAllowed, RunError, Unreachable

# TensorStore's and google-cloud-cpp's errors name the codes of absl, once they have tried
# often enough; those of gcsfs and Google's own come from their packages.
_DENIED = re.compile('PERMISSION_DENIED|UNAUTHENTICATED|Forbidden')
_OUTAGE = re.compile(
  'UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|Retry policy exhausted'
)
_LIBRARIES = ('gcsfs', 'aiohttp', 'requests', 'google')


def raise_if_outage(error: Exception, path) -> None:
  """Raises NotAllowed or Unreachable if an error says nothing of what was asked for.

  Args:
    error: of Orbax, TensorStore or ArrayRecord, that was at work on `path` in a bucket.
  """
  if isinstance(error, RunError):  # which knows itself what it is
    raise error
  line = ' '.join(str(error).split())[:200]
  if _DENIED.search(line):
    raise NotAllowed(f'{path}: this account is not allowed to ({line}).') from error
  if (
    type(error).__module__.partition('.')[0] in _LIBRARIES
    or isinstance(error, TimeoutError | ConnectionError)
    or _OUTAGE.search(line)
  ):
    raise Unreachable(
      f'{path}: the bucket does not answer ({type(error).__name__}: {line}). What was '
      'written is intact: rerun the same command.'
    ) from error
