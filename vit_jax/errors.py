"""Errors that the user sees as one line and an exit code.

`main` and the tools print `str(error)` and exit with `error.exit_code`. Any other exception
is a defect of this package and keeps its traceback.
"""

import errno
import os
import re

EXIT_CODES = {
  0: 'done',
  2: 'bad config or argument',
  65: 'no usable checkpoint',
  74: 'disk full',
  75: 'stopped (rerun to resume)',
  76: 'diverged',
  77: 'out of memory',
  130: 'interrupted before there was a state to save',
}


class RunError(Exception):
  """Base class of errors that end a run for a reason that fits into one line."""

  exit_code = 1


class UserError(RunError, ValueError):
  """Bad config, argument or input. The message names it, allowed values and the next step."""

  exit_code = 2


class DataError(UserError):
  """The data set is not on this machine; `main` suggests what to try without it."""


class BadImage(UserError):
  """An image that cannot be read or used; in a data set it is masked."""


class NotAllowed(UserError):
  """This account may not read or write a bucket."""


class NoUsableCheckpoint(RunError):
  """There are checkpoints, but none can be restored; nothing was deleted."""

  exit_code = 65


class DiskFull(RunError):
  """The disk is full: a file could not be written. Older files are intact."""

  exit_code = 74


class Stopped(RunError):
  """Base class: something outside of the run ended it, and the same command resumes it."""

  exit_code = 75


class Preempted(Stopped):
  """The run was asked to stop, and its state is saved."""


class Unreachable(Stopped):
  """A bucket did not answer even after retries; written files are intact."""


class PeerLost(Stopped):
  """Another process of the run ended; the run resumes from its checkpoints."""


class Diverged(RunError):
  """Training diverged: steps or the state are not finite. The last good state is kept."""

  exit_code = 76


class OutOfMemory(RunError):
  """The step does not fit into the device's memory; the message suggests a change."""

  exit_code = 77


class Interrupted(RunError):
  """Interrupted by Ctrl-C before there was a state to save, or in a tool."""

  exit_code = 130


def printable(text, keep: str = '') -> str:
  """Escapes the control characters and line breaks of a text, except those in `keep`.

  Output may contain names from files, which could move the cursor or look like lines.
  """
  escaped = lambda c: c.encode('unicode_escape').decode('ascii')
  return ''.join(c if c.isprintable() or c in keep else escaped(c) for c in str(text))


def one_line(text, most: int = 300) -> str:
  """Formats a text or an exception for one line, with at most `most` characters."""
  shown = printable(' '.join(str(text).split()).rstrip('.'))
  return shown if len(shown) <= most else f'{shown[: most - 3]}...'


def disk_is_full(error: BaseException) -> bool:
  """Whether an exception means a full disk, quota or inode table, or a file size limit."""
  codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
  if isinstance(error, OSError) and error.errno in codes:
    return True
  # TensorStore and TensorFlow raise errors of their own types that quote the system's.
  return any(os.strerror(code).lower() in str(error).lower() for code in codes)


def choose(noun: str, value, table, also: str = ''):
  """Returns `table[value]`, or `value` itself if `table` is a list of names.

  Raises UserError for any other value, and suggests the closest name. `also` is appended to
  the list of names in the message: ', or a path'.
  """
  if value not in list(table):
    raise UserError(
      f'Unknown {noun} {value!r}: one of {list(table)}{also}.{did_you_mean(value, table)}'
    )
  return table[value] if isinstance(table, dict) else value


# {a common name of a config key elsewhere, without punctuation: the key here}.
SYNONYMS = {
  **dict.fromkeys(('learningrate', 'baselr', 'peaklr'), 'optim.lr'),
  **dict.fromkeys(('weightdecay', 'decay'), 'optim.wd'),
  **dict.fromkeys(('maxepochs', 'numepochs', 'numtrainepochs'), 'epochs'),
  **dict.fromkeys(('maxsteps', 'numsteps', 'totalsteps', 'iterations'), 'steps'),
  **dict.fromkeys(('numworkers', 'jobs'), 'data.workers'),
  **dict.fromkeys(('batch', 'bs', 'batchsize', 'trainbatchsize'), 'data.batch_size'),
  'droppath': 'model.stochastic_depth',
}


def nearest(name, names, alike: float = 0.6) -> str | None:
  """Returns the name that is probably meant by `name`, or None; ignores punctuation."""
  import difflib

  plain = lambda text: re.sub(r'[\W_]', '', str(text).lower())
  by_plain = {plain(x): str(x) for x in reversed([*names])}
  if full := SYNONYMS.get(plain(name)):
    section, _, key = full.rpartition('.')
    if match := by_plain.get(plain(key)) or (section in by_plain and full):
      return match
  # The first name that begins with a long text, as 'vit_tiny' of timm, or the most similar.
  text = plain(name)
  longer = [x for x in by_plain if len(text) > 5 and x.startswith(text)]
  near = longer[-1:] or difflib.get_close_matches(text, by_plain, 1, alike)
  return by_plain[near[0]] if near else None


def did_you_mean(name, names, alike: float = 0.6) -> str:
  """Returns ' Did you mean "x"?' for the nearest of `names`, or ''."""
  near = nearest(name, names, alike)
  return f' Did you mean "{near}"?' if near and near != str(name) else ''
