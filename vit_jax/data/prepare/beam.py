"""The TFDS builder of a plan, as a generator or as an Apache Beam pipeline.

`_generate_examples` is a plain generator, which TFDS writes in one process and without
resuming (`local` resumes); with `beam`, a PTransform that reads the pieces on many
workers. The order of the examples is TFDS's, and the same in all three.
"""

import contextlib
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable

from vit_jax.data.prepare import features, report, writer
from vit_jax.data.prepare.plan import LeftOut, Outcome, Plan, number
from vit_jax.errors import UserError


def load_beam():
  """Returns the apache_beam module.

  Raises:
    UserError: if it is not installed, naming the extra.
  """
  try:
    import apache_beam
  except ImportError as error:
    raise UserError(
      f"A Beam runner needs apache-beam ({error}): pip install 'vit_jax[beam]', in an "
      'environment of its own, as it holds other packages back.'
    ) from None
  return apache_beam


def build(plan: Plan, data_dir: str, *, file_format: str, beam: bool = False):
  """Returns a `tfds.core.GeneratorBasedBuilder` of the plan.

  All names in the input are read first: TFDS wants classes and splits before examples.

  Args:
    plan: for `beam`, made with `ranges=True`.
    data_dir: a directory, or a bucket (gs://) that the workers reach.
    file_format: 'array_record' or 'tfrecord'.
    beam: make `_generate_examples` a PTransform.
  """
  tfds = features.load_tfds()
  class_names, splits = _inventory(plan)

  class Base(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    name = plan.name
    VERSION = tfds.core.Version(plan.version)

    def _info(self):
      schema = features.features(class_names, plan.multi_label)
      return tfds.core.DatasetInfo(
        builder=self, features=schema, **features.facts(plan)
      )

  class Generator(Base, skip_registration=True):
    name = plan.name

    def _split_generators(self, dl_manager):
      return {split: self._generate_examples(split) for split in splits}

    def _generate_examples(self, split):
      for piece in plan.pieces:
        for outcome in plan.outcomes(piece):
          if outcome.kind == 'kept' and outcome.place.split == split:
            yield _example(outcome, plan.multi_label)

  class Parallel(Base, skip_registration=True):
    name = plan.name

    # TFDS hands the pipeline to those that ask, so that all splits share one reading.
    def _split_generators(self, dl_manager, pipeline):
      outcomes = pipeline | 'Read' >> self._generate_examples()
      _count(outcomes, str(self.data_path.parent / _counts_name(plan)))
      return {split: _of_split(outcomes, split, plan.multi_label) for split in splits}

    def _generate_examples(self):
      return _read(plan)

  return (Parallel if beam else Generator)(data_dir=data_dir, file_format=file_format)


def prepare(
  plan: Plan,
  data_dir: str,
  *,
  runner: str,
  options: list[str],
  file_format: str = 'array_record',
  log: Callable[[str], None] = lambda line: None,
) -> tuple[str, dict]:
  """Prepares a data set with Apache Beam.

  As `local.prepare`, but a cluster has its own ways to go on: a worker that is lost is
  replaced by the runner; a pipeline that ends is to be run again from its start. Until
  it is done, nothing stands where the data set will.

  Args:
    plan: made with `ranges=True`.
    data_dir: must be the same place for all workers.
    runner: 'DirectRunner', 'DataflowRunner', 'FlinkRunner', ...
    options: of the pipeline: ['--project=P', ...].
    file_format, log: see `local.prepare`.
  """
  beam = load_beam()
  tfds = features.load_tfds()
  home = tfds.core.Path(data_dir).expanduser() / plan.name
  writer.check_new(str(home / plan.version))
  pipeline_options = beam.options.pipeline_options.PipelineOptions(options)
  try:
    beam.runners.create_runner(runner)
  except (ValueError, ImportError) as error:
    raise UserError(f'--beam_runner {runner}: {error}') from None
  log(f'reads the names in {len(plan.pieces):,} pieces')
  made = build(plan, data_dir, file_format=file_format, beam=True)
  log(f'{runner}: reads and writes')
  config = tfds.download.DownloadConfig(
    beam_runner=runner,
    beam_options=pipeline_options,
    try_download_gcs=False,
    ignore_duplicates=True,
  )
  # Nothing is downloaded, but TFDS makes the folders for it.
  with tempfile.TemporaryDirectory() as unused:
    made.download_and_prepare(download_dir=unused, download_config=config)
  counts = home / _counts_name(plan)
  tally = report.Tally(json.loads(counts.read_text()))
  _reconcile(plan, tally, made.info)
  label = made.info.features['labels' if plan.multi_label else 'label']
  names = tuple(getattr(label, 'feature', label).names)
  result = report.make(tally, plan.name, plan.version, names)
  report.write(result, str(home / plan.version))
  counts.unlink()
  return str(home / plan.version), result


def _inventory(plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns (class names, splits) without reading images."""
  if plan.class_names is not None and plan.splits is not None:
    return plan.class_names, plan.splits
  labels, splits = set(), set()
  for piece in plan.pieces:
    for entry in piece.entries():
      with contextlib.suppress(LeftOut):
        place = plan.place(entry)
        labels.update(place.labels)
        splits.update([place.split] if entry.read else [])
  return plan.class_names or number(labels), plan.splits or tuple(sorted(splits))


def _read(plan: Plan):
  """Returns a PTransform from nothing to outcomes."""
  beam = load_beam()
  pieces = list(plan.pieces)
  rest = dataclasses.replace(plan, pieces=())

  class Read(beam.PTransform):
    def expand(self, begin):
      return (
        begin
        | 'Pieces' >> beam.Create(pieces)
        | 'Spread' >> beam.Reshuffle()
        | 'Outcomes' >> beam.FlatMap(rest.outcomes)
      )

  return Read()


def _count(outcomes, path: str) -> None:
  """Adds the writing of the tally, as JSON, to the pipeline."""
  beam = load_beam()

  class Sum(beam.CombineFn):
    def create_accumulator(self):
      return report.Tally()

    def add_input(self, tally, outcome):
      tally.add(outcome)
      return tally

    def merge_accumulators(self, tallies):
      return functools.reduce(report.Tally.merge, tallies, report.Tally())

    def extract_output(self, tally):
      return json.dumps(tally.state())

  write = functools.partial(_write_text, path)
  _ = outcomes | 'Count' >> beam.CombineGlobally(Sum()) | 'Counts' >> beam.Map(write)


def _write_text(path: str, text: str) -> None:
  features.load_tfds().core.Path(path).write_text(text)


def _of_split(outcomes, split: str, multi_label: bool):
  """Returns the (key, example) of a split."""
  beam = load_beam()
  return (
    outcomes
    | f'Only {split}' >> beam.Filter(_is_kept, split)
    | f'Examples of {split}' >> beam.Map(_example, multi_label)
  )


def _is_kept(outcome: Outcome, split: str) -> bool:
  return outcome.kind == 'kept' and outcome.place.split == split


def _example(outcome: Outcome, multi_label: bool):
  return outcome.place.key, features.example(outcome.place, outcome.data, multi_label)


def _reconcile(plan: Plan, tally: report.Tally, info) -> None:
  """Tells of files that no worker can know of: names met twice, and names never met."""
  for split in tally.examples:
    written = info.splits[split].num_examples
    if again := tally.examples[split] - written:
      reason = 'second files of their names; still in the counts per class'
      tally.leave('skipped', f'{again} of {split}', reason)
      tally.examples[split] = written
  if hasattr(plan.place, 'expected'):
    met = sum(tally.examples.values()) + tally.left['broken']
    if missing := len(list(plan.place.expected())) - met:
      reason = 'in the list of labels, but not in the input'
      tally.leave('broken', f'{missing} files', reason)


def _counts_name(plan: Plan) -> str:
  return f'incomplete.{plan.version}.counts.json'
