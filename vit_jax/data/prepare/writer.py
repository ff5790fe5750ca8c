"""Carries out a plan in one process, and resumes where it was interrupted.

TFDS's own writer keeps nothing of an interrupted preparation. This one makes the same
shards of the same examples in two passes: `_scatter` reads the input once, and appends
each image to a bucket of its hash; `_gather` writes the shards from the buckets, each in
the order of the hashes, and deletes every bucket that is done. So the disk needs the
size of the input and of two shards; TFDS's writer needs as much.

The files are the same, to the byte, from run to run and after interruptions.

Until the end all is in a folder 'incomplete.VERSION', where progress.json says what
counts. One rename makes it the data set.
"""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator

import numpy as np

from vit_jax.data.prepare import buckets, features, report
from vit_jax.data.prepare.plan import Plan, number
from vit_jax.errors import DiskFull, UserError

_SAY_EVERY = 10.0  # seconds


def prepare(
  plan: Plan,
  data_dir: str,
  *,
  file_format: str = 'array_record',
  checkpoint_every: float = 60.0,
  log: Callable[[str], None] = lambda line: None,
) -> tuple[str, dict]:
  """Writes a data set to DATA_DIR/NAME/VERSION, with report.json and report.txt.

  Args:
    plan: what to write.
    data_dir: a local directory, where TFDS's data sets are.
    file_format: 'array_record' or 'tfrecord' (needs TensorFlow).
    checkpoint_every: seconds of reading that an interruption costs at most.
    log: takes lines about the progress.

  Returns:
    (the data set's directory, the report).

  Raises:
    UserError: if it is there already, begun from other input, or has no image; if TFDS
      or TensorFlow is needed and missing.
    DiskFull: what is done is kept.
  """
  if '://' in data_dir:
    raise UserError(f'--data_dir {data_dir}: one process needs a mounted directory.')
  home = os.path.join(os.path.expanduser(data_dir), plan.name)
  final = os.path.join(home, plan.version)
  work = os.path.join(home, f'incomplete.{plan.version}')
  if os.path.exists(final) and not os.path.exists(os.path.join(work, 'shards')):
    shutil.rmtree(work, ignore_errors=True)  # of a run that ended at its last step
  check_new(final)
  if file_format == 'tfrecord':
    from vit_jax.data import lazy_tf

    lazy_tf.load()
  try:
    os.makedirs(work, exist_ok=True)
    with _alone(work):
      state = buckets.State(work, plan, file_format)
      if not state.scattered:
        _check_space(plan, state, work)
        _scatter(plan, state, checkpoint_every, log)
      result = _gather(plan, state, file_format, log)
      os.rename(state.out, final)
  except Exception as error:
    if not _is_disk_full(error):
      raise
    raise DiskFull(
      f'{home}: the disk is full. What is done is kept: make room (the data set takes '
      f'about {plan.size / 1e9:.2f} GB), and run the same command again.'
    ) from error
  shutil.rmtree(work)
  return final, result


def check_new(final: str) -> None:
  """Raises UserError if a data set is there, on a disk or in a bucket."""
  if features.load_tfds().core.Path(final).exists():
    raise UserError(
      f'{final} is there already. Prepare another --version or --name, or delete it.'
    )


def _scatter(plan: Plan, state: buckets.State, every: float, log) -> None:
  """Reads the input from where it was left."""
  saved = said = time.monotonic()
  tally = state.tally
  if state.piece or state.entry:
    log(f'resuming after {sum(tally.examples.values()):,} images')
  with buckets.Writer(state) as writer:
    while state.piece < len(plan.pieces):
      piece = plan.pieces[state.piece]
      for outcome in plan.outcomes(piece, state.entry, threads=os.cpu_count() or 1):
        if outcome.kind == 'kept':
          writer.add(outcome.place, outcome.data)
        tally.add(outcome)
        state.entry += 1
        now = time.monotonic()
        if now - saved >= every:
          writer.flush()
          state.save()
          saved = time.monotonic()
        if now - said >= _SAY_EVERY:
          said = now
          done = sum(tally.size.values()) / 1e9
          log(
            f'{sum(tally.examples.values()):,} images, {done:.2f} of about '
            f'{plan.size / 1e9:.2f} GB, {tally.left["broken"]:,} broken'
          )
      state.piece, state.entry = state.piece + 1, 0
    writer.flush()
    state.save()
    if not sum(tally.examples.values()):
      shutil.rmtree(os.path.dirname(state.out))
      left = [file for kind in tally.named.values() for file in kind]
      why = ''.join(f' Left out: {f["path"]} ({f["reason"]}), ...' for f in left[:1])
      raise UserError(f'{plan.name}: the input has no image that can be read.{why}')
    _settle(plan, state, writer)
  state.scattered = True
  state.save()


def _settle(plan: Plan, state: buckets.State, writer: buckets.Writer) -> None:
  """Takes back what has a name twice, and lists what should be there and is not."""
  there = set()
  checks = hasattr(plan.place, 'expected')
  for split in list(state.tally.examples):
    rows, again = state.rows(split)
    for place, data in state.read(split, again):
      reason = 'a second file of this name'
      state.tally.take_back(split, place.labels, len(data), place.key, reason)
    if checks:
      there.update((split, hi, lo) for hi, lo in rows[['hi', 'lo']].tolist())
  if not checks:
    return
  broken = {file['path'] for file in state.tally.named.get('broken', ())}
  for split, key in plan.place.expected():
    if (split, *writer.hash(split, key)) not in there and key not in broken:
      state.tally.leave('broken', key, 'in the list of labels, but not in the input')


def _gather(plan: Plan, state: buckets.State, file_format: str, log) -> dict:
  """Writes the shards that are missing, and what stands beside them."""
  tfds = features.load_tfds()
  from tensorflow_datasets.core import file_adapters
  from tensorflow_datasets.core.utils import shard_utils

  names = plan.class_names or number(state.tally.classes)
  schema = features.features(names, plan.multi_label)
  adapter = file_adapters.ADAPTER_FOR_FORMAT[tfds.core.FileFormat(file_format)]
  infos, written = [], set()
  for split in sorted(s for s, n in state.tally.examples.items() if n):
    template = tfds.core.ShardedFileTemplate(
      data_dir=tfds.core.Path(state.out),
      dataset_name=plan.name,
      split=split,
      filetype_suffix=adapter.FILE_SUFFIX,
    )
    rows, _ = state.rows(split)
    num_shards = shard_utils.ShardConfig().get_number_shards(
      total_size=state.tally.size[split], num_examples=len(rows)
    )
    ends = shard_utils.get_shard_boundaries(len(rows), num_shards)
    paths = [os.fspath(path) for path in template.sharded_filepaths(num_shards)]
    sizes = state.shards.setdefault(split, [])
    for i in range(len(sizes), num_shards):
      part = rows[ends[i - 1] if i else 0 : ends[i]]
      sizes.append(_write_shard(paths[i], part, split, plan, state, schema, adapter))
      state.save()
      log(f'{split}: wrote shard {i + 1:,} of {num_shards:,}')
      state.delete_before(split, rows[ends[i] :])
    written.update(map(os.path.basename, paths))
    infos.append(
      tfds.core.SplitInfo(
        name=split,
        shard_lengths=np.diff([0, *ends]).tolist(),
        num_bytes=sum(sizes),
        filename_template=template,
      )
    )
  for name in set(os.listdir(state.out)) - written:
    os.remove(os.path.join(state.out, name))  # of an end that was interrupted
  tfds.folder_dataset.write_metadata(
    data_dir=state.out,
    features=schema,
    split_infos=infos,
    version=plan.version,
    check_data=False,
    **features.facts(plan),
  )
  result = report.make(state.tally, plan.name, plan.version, names)
  report.write(result, state.out)
  return result


def _write_shard(path, rows, split, plan, state, schema, adapter) -> int:
  """Returns the bytes of its serialised examples."""
  from tensorflow_datasets.core import example_serializer

  serializer = example_serializer.ExampleSerializer(schema.get_serialized_info())
  sizes = []

  def serialized() -> Iterator[tuple[int, bytes]]:
    for place, data in state.read(split, rows):
      example = features.example(place, data, plan.multi_label)
      message = serializer.get_tf_example(schema.encode_example(example))
      # As `schema.serialize_example`, but with the keys of its map sorted: otherwise
      # their order differs from process to process.
      line = message.SerializeToString(deterministic=True)
      sizes.append(len(line))
      yield len(sizes), line

  temporary = f'{path}.tmp'
  adapter.write_examples(temporary, serialized())
  if adapter.num_examples(temporary) != len(rows):
    raise OSError(errno.EIO, f'{temporary} does not hold the {len(rows)} examples')
  with open(temporary, 'rb') as file:
    os.fsync(file.fileno())  # before its buckets are deleted
  os.replace(temporary, path)
  return sum(sizes)


def _check_space(plan: Plan, state: buckets.State, work: str) -> None:
  needed = plan.size - sum(state.sizes.values())
  free = shutil.disk_usage(work).free
  if needed > free and plan.max_side is None:  # else it takes less, but how much?
    raise DiskFull(
      f'{work}: the data set takes about {plan.size / 1e9:.2f} GB, {needed / 1e9:.2f} GB '
      f'more than is there, but {free / 1e9:.2f} GB are free. Make room, or give another '
      '--data_dir.'
    )


def _is_disk_full(error: Exception) -> bool:
  # TensorFlow and ArrayRecord have errors of their own, with the system's words.
  full = (errno.ENOSPC, errno.EDQUOT)
  return any(
    getattr(error, 'errno', 0) == n or os.strerror(n) in str(error) for n in full
  )


@contextlib.contextmanager
def _alone(work: str):
  """Holds a lock that ends with the process, however that ends."""
  import fcntl

  with open(os.path.join(work, 'lock'), 'w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise UserError(f'{work}: another process is preparing this data set.') from None
    yield
