"""Publishes a model on the Hugging Face Hub, with a card made from its run.

  vit_jax push SOURCE OWNER/NAME [--private] [--format timm|hf|google]

SOURCE is any source that `vit_jax.load` takes. A folder is written and uploaded: weights
that timm or transformers and this library can read, the preprocessing, the run's config and
a model card. With `--dry_run` the folder is only written, for you to look at. The card states
the licence of the weights that the run started from; `--license` states another one.
"""

import math
import re
import sys
import tempfile
from pathlib import Path

from vit_jax import cli, files
from vit_jax.errors import UserError, one_line, printable
from vit_jax.tools import source

# The first format that can express the model is taken.
FORMATS = ('timm', 'hf', 'google')
# The name of the card, and the hub's identifier of an unknown licence.
CARD, UNKNOWN = 'README.md', 'unknown'
_LIBRARIES = {'timm': 'timm', 'hf': 'transformers', 'google': 'vit_jax'}


def main(argv: list[str]) -> int:
  """Writes the folder and uploads it."""
  args = _parser().parse_args(argv)
  if not re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', args.repo):
    raise UserError(f'{args.repo!r}: expected OWNER/NAME, as on the hub.')
  with tempfile.TemporaryDirectory(prefix='vit_jax-') as place:
    folder = Path(place) / 'model'
    if args.out or args.dry_run:
      folder = files.local_path(args.out or args.repo.replace('/', '-'), '--out')
      if folder.exists():
        raise UserError(f'{folder} is there already: name another with --out FOLDER.')
    api = None if args.dry_run else client()
    record = write(args, folder)
    if api:
      record['url'], record['card'] = upload(api, args, folder)
  if args.json:
    cli.print_json(record)
    return 0
  print(f'{args.source}: {record["params"]:,} parameters as {record["to"]}')
  if record['license'] == UNKNOWN:
    print('  The licence is unknown: --license apache-2.0 states one.')
  if not api:
    print(f'  Not uploaded. Look at {folder / CARD}, then run without --dry_run.')
    return 0
  print(f'  {record["url"]}')
  if not record['card']:
    print(f'  Its {CARD} stays; delete it there for a new one.')
  return 0


def client():
  """Returns huggingface_hub's client; raises UserError if the package is missing."""
  try:
    import huggingface_hub
  except ImportError:
    raise UserError(
      "push needs huggingface_hub: pip install 'vit_jax[hub]', or --dry_run."
    ) from None
  return huggingface_hub.HfApi()


def upload(api, args, folder: Path) -> tuple[str, bool]:
  """Uploads a folder; returns (address of the model, whether its card was written).

  If the repository already has a card, that card stays, because somebody may have edited it.
  """
  try:
    api.create_repo(args.repo, private=args.private, exist_ok=True)
    keep = api.file_exists(args.repo, CARD)
    api.upload_folder(
      repo_id=args.repo,
      folder_path=folder,
      commit_message=f'{args.source}, by vit_jax',
      ignore_patterns=[CARD] if keep else None,
    )
  except Exception as error:
    # Errors of the hub, or of its HTTP library.
    why = one_line(f'{type(error).__name__}: {error}')
    raise UserError(
      f'Could not push to {args.repo}: {why}. Set HF_TOKEN, or pass --dry_run.'
    ) from None
  return f'https://huggingface.co/{args.repo}', not keep


def write(args, folder: Path) -> dict:
  """Writes the files of the repository to a new folder.

  Returns:
    repo, source, step, folder, to (the format), params and license.
  """
  from vit_jax.train import metrics
  from vit_jax.weights import pipelines, read, runs, zoo

  source = read(args.source, ema=args.ema, weights=args.weights)
  to, params = _write(source, folder, args.format)
  run = runs.find(args.source)
  config, results = _run(run[0], source.step) if run else ({}, {})
  began = (config.get('weights') or {}).get('source') or args.source
  base = re.fullmatch(r'hf:([^@]+)(@.*)?', began)
  licence = zoo.find_licence(args.source)
  size = source.usual_size()
  facts = {
    'repo': args.repo,
    'format': to,
    'library': _LIBRARIES[to],
    'family': source.family,
    'variant': config.get('model', {}).get('variant'),
    'params': params,
    'size': size,
    'pp': pipelines.build(source, size),
    'classes': source.fields.get('num_classes'),
    'class_names': source.class_names,
    'license': args.license or licence.name or UNKNOWN,
    'stated': bool(args.license),
    'origin': licence.origin and _hide_folders(licence.origin),
    'base': base and base[1],
    'dataset': _dataset(config),
    'config': public(config),
    'step': source.step,
    'results': results,
  }
  if config:
    metrics.write_json(folder / 'training_config.json', facts['config'])
  (folder / CARD).write_text(card(facts), encoding='utf-8')
  record = {key: facts[key] for key in ('repo', 'params', 'license', 'step')}
  return record | {'source': args.source, 'folder': str(folder), 'to': to}


def _write(source, folder: Path, to: str | None) -> tuple[str, int]:
  """Writes the weights, and returns (format, number of parameters)."""
  from vit_jax import weights

  reasons = {}
  for name in [to] if to else FORMATS:
    try:
      if name != 'google':
        return name, weights.write(source, folder, name)[1]
      folder.mkdir(parents=True, exist_ok=True)
      return name, weights.write(source, folder / 'model.npz', name)[1]
    except UserError as error:
      reasons[str(error)] = name
  if 'google' in reasons.values():
    folder.rmdir()
  raise UserError(' '.join(reasons))


def _run(folder: Path, step: int) -> tuple[dict, dict[str, str]]:
  """Returns (config, {name: (value, text)} of the results that were saved with a step).

  A result is a number that says how good the model is, unlike times and counts.
  """
  from vit_jax import config as config_lib
  from vit_jax import evaluators
  from vit_jax.weights import steps

  config, results = config_lib.read(folder), {}
  evals = config.get('evals', {})
  for name, value in (steps.Steps(folder, config).metrics.get(step) or {}).items():
    metric = evaluators.find_metric(name, evals)
    of_evaluation = name.partition('/')[0] in evals
    if of_evaluation and metric.larger_is_better is not None and math.isfinite(value):
      results[name] = value, f'{value:.2%}' if metric.percent else f'{value:.6g}'
  return config, dict(sorted(results.items()))


def _dataset(config: dict) -> str | None:
  """Returns the hub's name of the training data; None for the user's own data."""
  data = config.get('data', {}).get('source')
  if not isinstance(data, str) or not data.startswith('tfds:'):
    return None
  name = re.split('[/:]', data.removeprefix('tfds:'))[0]
  return {'imagenet2012': 'imagenet-1k'}.get(name, name)


def card(facts: dict) -> str:
  """Returns the model card: Markdown that begins with metadata in YAML for the hub."""
  import jinja2

  environment = jinja2.Environment(
    loader=jinja2.PackageLoader('vit_jax.tools', 'template'),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
  )
  environment.filters['md'] = markdown
  environment.policies['json.dumps_kwargs'] = {'sort_keys': False}
  return environment.get_template('card.md').render(facts)


def markdown(text) -> str:
  """Escapes a text, so that Markdown and HTML show it unchanged."""
  return re.sub(r'([\\`*_{}\[\]<>()#!|~&$])', r'\\\1', printable(text))


def public(value):
  """Returns a config without class names, which the weights have, and without folder names."""
  if isinstance(value, dict):
    hidden = ('workdir', 'class_names')
    return {key: public(x) for key, x in value.items() if key not in hidden}
  if isinstance(value, list | tuple):
    return [public(item) for item in value]
  return _hide_folders(value) if isinstance(value, str) else value


def _hide_folders(text: str) -> str:
  """Shortens 'folder:/home/me/photos' to 'folder:photos'; keeps gs://bucket/a."""
  return re.sub(
    r'(?<![\w:/])(folder:|records:|arrays:)?(~|\.{1,2})?/(?:[^/|]*/)*',
    lambda match: match[1] or '',
    text,
  )


def _parser() -> cli.Parser:
  parser = cli.Parser('vit_jax push', description=__doc__.split('\n')[0])
  source.add_options(parser, variant=False, resolution=False)
  add = parser.add_argument
  add('repo', metavar='OWNER/NAME', help='on huggingface.co')
  add('--format', choices=FORMATS, help='default: the first that fits')
  add('--private', action='store_true', help='if the repository is made')
  add('--license', metavar='ID', help="stated in the card: 'apache-2.0'")
  add('--dry_run', action='store_true', help='write the folder only')
  add('--out', metavar='FOLDER', help='keep it there; --dry_run: OWNER-NAME by default')
  return parser


if __name__ == '__main__':
  sys.exit(cli.run(main))
