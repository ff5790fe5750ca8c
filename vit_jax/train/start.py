"""What a run opens before its first step: its data, its checkpoints, its weights."""

from pathlib import Path

import jax

from vit_jax import config as config_lib
from vit_jax import distributed, run_config, sharding, tasks, trees, weights
from vit_jax.checkpoint import checkpoints
from vit_jax.data import pipeline
from vit_jax.errors import UserError
from vit_jax.evaluators import predictions
from vit_jax.train import environment, folder, loggers, metrics, periods, schema
from vit_jax.train.runtime import prepare_once
from vit_jax.train.state import State


def check_files(workdir: Path) -> None:
  """Raises UserError if a folder, pipe or device has the name of one of a run's files."""
  files = ('config.json', 'status.json', 'metrics.jsonl', 'bad_images.jsonl')
  files += (environment.FILE, predictions.FILE, loggers.IDS, folder.LOG_FILE)
  for path in (workdir / name for name in files):
    if path.exists() and not path.is_file():
      raise UserError(f'{path} is not a file: move it away, or use another --workdir.')
  steps = workdir / 'checkpoints'
  if steps.exists() and not steps.is_dir():
    raise UserError(f'{steps} is not a folder: move it away, or use another --workdir.')


def open_data(config: dict, workdir: Path, mesh) -> pipeline.Batches:
  """Returns the training batches, and prints what they hold.

  Raises:
    UserError: if the data is missing or does not fit the config, or is not the same for
      all processes.
  """
  section = config['data']
  divisor = sharding.batch_divisor(mesh) * config['optim'].get('accum', 1)
  if section['batch_size'] % divisor:
    raise UserError(
      f'config.data.batch_size={section["batch_size"]} must be a multiple of {divisor}: '
      'mesh data x fsdp x optim.accum.'
    )
  data = pipeline.train(
    **{'num_classes': config['model'].get('num_classes'), **section},
    seed=config['seed'],
    bad_log=workdir / 'bad_images.jsonl',
    **sharding.host_of_batch(mesh),
  )
  # With other files, or the same in another order, each host would take its share of a
  # different data set, and nothing would show it. Installed packages matter: they decide
  # which files are images.
  digits = int(data.fingerprint[:7], 16)
  if not distributed.agree(distributed.from_first(digits) == digits):
    raise UserError(
      f'{data.source.name} is not the same for all processes: process '
      f'{jax.process_index()} sees {data.num_examples:,} examples with the fingerprint '
      f'{data.fingerprint}. Give all of them the same files and the same packages.'
    )
  print(
    'Data:', *(f'train: {line}' for line in data.describe()), sep='\n  ', flush=True
  )
  return data


def warn(data: pipeline.Batches, evals: dict) -> None:
  """Warns of likely mistakes in the data of training and evaluations, a line each."""
  evaluated = [getattr(e.evaluator, 'batches', None) for e in evals.values()]
  sets = [data, *(x for x in evaluated if x is not None)]
  lines = [line for x in sets for line in x.warnings()]
  for line in dict.fromkeys(lines):  # several evaluations may be of the same images
    distributed.say(f'warning: {line}')


def resolve(config: dict, data: pipeline.Batches) -> dict:
  """Returns the config with what the data determines: classes, steps, image shape."""
  num_classes, names = None, data.class_names  # no head
  if feature := tasks.classes(config):
    known, names = data.classes_of(feature)
    num_classes = config['model'].get('num_classes', known)
    if num_classes is None:
      raise UserError(
        f'config.model.num_classes is not set and {config["data"]["source"]!r} does not '
        'tell its number of classes; set it.'
      )
    if num_classes < known:
      said = f'config.data.num_classes={known}'
      if feature != 'label':
        said = f'The {feature} of {data.source.name} have {known} classes'
      raise UserError(
        f'{said}, config.model.num_classes={num_classes}: a model has as many classes as '
        'its data, or more.'
      )
  total = config_lib.total_steps(config, data.num_examples, data.batch_size)
  return {
    **periods.in_steps(config, total),
    'model': {**config['model'], 'num_classes': num_classes},
    'resolved': {
      'format': run_config.FORMAT,
      'total_steps': total,
      'num_examples': data.num_examples,
      'fingerprint': data.fingerprint,
      'class_names': names,
      'image_shape': list(data.spec['image'].shape[1:]),
    },
  }


def open_checkpoints(config: dict, workdir: Path) -> checkpoints.Checkpoints:
  """Returns the checkpoints of a run's folder, which `config.checkpoint` describes."""
  best, options = config['checkpoint'].get('best'), {}
  if best:
    options['larger_is_better'] = metrics.larger_is_better(best, config['evals'])
  folder = workdir / 'checkpoints'
  section = {k: v for k, v in config['checkpoint'].items() if k != 'patience'}
  return checkpoints.Checkpoints(folder, **section, **options)


def open_weights(config: dict) -> tuple[dict, weights.Source]:
  """Returns (config with the model that the weights are of, the weights)."""
  source = weights.from_section(**config['weights'])
  told = {} if 'name' in config['model'] else weights.complete({}, source)
  return schema.with_model(config, told), source


def from_weights(source, model, config, frozen) -> dict:
  """Returns {name: array} of the variables that a run takes from its weights.

  Args:
    source: the weights that it starts from. None: there are none, or it resumes: then
      they are opened again if any parameters are frozen, which checkpoints do not hold.

  Raises:
    UserError: for frozen parameters that the weights do not provide.
  """
  names = list(trees.flatten(frozen))
  if names and source is None and config['weights']:
    try:
      source = weights.from_section(**config['weights'])
    except UserError as error:
      raise UserError(
        f'{error} The run resumes with frozen parameters, which only config.weights.'
        'source holds: set it to where those weights are now.'
      ) from error
  given = _fit_weights(source, model, config) if source else {}
  if lost := [name for name in names if name not in given]:
    raise UserError(
      f'config.tune freezes {lost[0]} (one of {len(lost)}), which config.weights does '
      'not provide: no resumed run could find its values again. Train it, or set '
      'config.weights.source to weights that have it.'
    )
  return given


def _fit_weights(source, model, config) -> dict:
  """Returns {name: array} of the variables that the run starts from."""
  *size, channels = config['resolved']['image_shape']
  if channels != source.channels:
    raise UserError(
      f'{source.source} is of {source.channels}-channel images, config.data.pp '
      f"gives {channels}: begin it with 'decode({source.channels})'."
    )
  options = {k: v for k, v in config['weights'].items() if k in ('skip', 'resize')}
  given, merge = weights.fit(source, model, tuple(size), **options)
  print(weights.describe(source, merge), flush=True)
  return given


def prepare_first_state(init, key, abstract: State, given: dict):
  """Returns what makes `init(key, given)` on the devices where `abstract` says it is.

  Its program is compiled meanwhile, see `prepare_once`.
  """
  places = trees.named(abstract.variables())
  given = {name: jax.device_put(x, places[name].sharding) for name, x in given.items()}
  return prepare_once(init, abstract, key, given)
