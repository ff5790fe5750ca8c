"""What the errors of the libraries that reach buckets mean: one line for each."""

import re

from vit_jax.errors import NotAllowed, RunError, Unreachable, UserError

# TensorStore and google-cloud-cpp name the codes of absl in their errors, once they have
# retried often enough; gcsfs raises errors of its own and those of the packages it uses.
_DENIED = re.compile('PERMISSION_DENIED|UNAUTHENTICATED|Forbidden')
_REFUSED = re.compile('^Bad Request|^Bucket is requester pays')
_OUTAGE = re.compile(
  'UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|Retry policy exhausted'
)
_LIBRARIES = ('gcsfs', 'aiohttp', 'requests', 'urllib3', 'google')


def raise_if_outage(error: Exception, path) -> None:
  """Raises an error of one line if the request for `path` failed, not what it returned.

  Returns otherwise: `error` is then about the data, the local disk, or a defect.

  Args:
    error: raised by gcsfs, Orbax, TensorStore or ArrayRecord while they used `path`, a
      path in a bucket.

  Raises:
    NotAllowed: this account may not do that.
    UserError: the server rejects the request, for an invalid name of a bucket for example.
    Unreachable: there was no answer, although the request was repeated.
    RunError: `error` itself, if it is one.
  """
  if isinstance(error, RunError):
    raise error
  text = ' '.join(str(error).split()).strip(', ')[:200]
  line = f'{type(error).__name__}: {text}' if text else type(error).__name__
  code = getattr(error, 'code', None)
  if code in (401, 403) or _DENIED.search(text):
    raise NotAllowed(
      f'{path}: not allowed ({line}). Log in with `gcloud auth application-default '
      "login`, or give this machine's service account access to the bucket."
    ) from error
  if code == 400 or _REFUSED.search(text):
    raise UserError(f'{path}: the server rejects the request ({line}).') from error
  if (
    type(error).__module__.partition('.')[0] in _LIBRARIES
    or isinstance(error, TimeoutError | ConnectionError)
    or _OUTAGE.search(text)
  ):
    raise Unreachable(
      f'{path}: the bucket does not answer ({line}). What was written is intact: rerun '
      'the same command.'
    ) from error
