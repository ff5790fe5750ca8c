"""Publishes a model on the Hugging Face Hub, with a card made from its run.

  vit_jax push SOURCE OWNER/NAME [--private] [--format timm|hf|google]

SOURCE is what `vit_jax.load` takes: a run's folder (RUN@best), a file, a hub folder, a
name of the zoo. A folder is written and uploaded: weights that timm or transformers and
this library read, the preprocessing, the run's config and a model card. With `--dry_run`
it is written only, for you to look at. The card states the licence of the weights that the
run started from; `--license` states another.
"""

import math
import re
import sys
import tempfile
from pathlib import Path

from vit_jax import cli, files
from vit_jax.errors import UserError
from vit_jax.tools import source
from vit_jax.tools.push import card, hub

FORMATS = ('timm', 'hf', 'google')  # the first that can express the model


def main(argv: list[str]) -> int:
  """Writes the folder and uploads it."""
  args = _parser().parse_args(argv)
  if not re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', args.repo):
    raise UserError(f'{args.repo!r}: expected OWNER/NAME, as on the hub.')
  if args.out or args.dry_run:
    folder = files.on_disk(args.out or args.repo.partition('/')[2], '--out')
    if folder.exists():
      raise UserError(f'{folder} is there already: --out FOLDER names another.')
    return _push(args, folder)
  with tempfile.TemporaryDirectory(prefix='vit_jax-') as place:
    return _push(args, Path(place) / 'model')


def _push(args, folder: Path) -> int:
  api = None if args.dry_run else hub.client()
  record = write(
    args.source,
    args.repo,
    folder,
    to=args.format,
    asked=args.license,
    ema=args.ema,
    weights=args.weights,
  )
  if api:
    record['url'], record['card'] = hub.upload(
      api,
      args.repo,
      folder,
      private=args.private,
      replace_card=args.replace_card,
      message=args.message or f'{args.source}, by vit_jax',
    )
  if args.json:
    cli.print_json(record)
    return 0
  print(f'{args.source}: {record["params"]:,} parameters as {record["to"]}')
  if record['license'] == card.UNKNOWN:
    print(
      '  The card says that the licence is unknown: --license apache-2.0 states one.'
    )
  if api:
    print(f'  {record["url"]}')
    if not record['card']:
      print(f'  Its {hub.CARD} was kept; --replace_card writes a new one.')
  else:
    print(f'  Not uploaded. Look at {folder / hub.CARD}, then run without --dry_run.')
  return 0


def write(
  source: str,
  repo: str,
  folder: Path,
  *,
  to: str | None = None,
  asked: str | None = None,
  ema: bool = False,
  weights: str | None = None,
) -> dict:
  """Writes what is published of a source to a new folder.

  Args:
    to: one of FORMATS; None: the first that can express the model.
    asked: the licence that the card states, in place of that of the weights.

  Returns:
    {'repo', 'source', 'step', 'folder', 'to', 'params', 'license'}.

  Raises:
    UserError: for what cannot be read, or be expressed in the format.
  """
  from vit_jax.weights import export, pipelines, published, read, runs

  found = read(source, ema=ema, weights=weights)
  to, params = _write(found, folder, to)
  run = runs.find(source)
  config, metrics, percent = _run(run[0], found.step) if run else (None, {}, set())
  size = export.usual_size(found)
  began = (config or {}).get('weights') or {}
  facts = card.Facts(
    repo=repo,
    format=to,
    model=_model(found, config),
    params=params,
    image_size=size,
    pp=found.pp or pipelines.plain(found, size),
    classes=found.fields.get('num_classes'),
    class_names=found.class_names,
    licence=published.licence(source),
    asked=asked,
    base=_base(began.get('source') or source),
    config=config,
    step=found.step,
    metrics=metrics,
    percent=percent,
  )
  if config:
    _write_json(folder / 'training_config.json', card.public(config))
  text = card.text(facts)
  (folder / hub.CARD).write_text(text, encoding='utf-8')
  return {
    'repo': repo,
    'source': source,
    'step': found.step,
    'folder': str(folder),
    'to': to,
    'params': params,
    'license': asked or facts.licence.name or card.UNKNOWN,
  }


def _write(source, folder: Path, to: str | None) -> tuple[str, int]:
  """Returns (the format that was written, the number of parameters)."""
  from vit_jax.weights import write

  refused = []
  for name in [to] if to else FORMATS:
    dest = folder / 'model.npz' if name == 'google' else folder
    try:
      if name == 'google':
        folder.mkdir(parents=True, exist_ok=True)
      return name, write(source, dest, name)[1]
    except UserError as error:
      refused.append(str(error))
      if name == 'google':
        folder.rmdir()
  raise UserError(' '.join(dict.fromkeys(refused)))


def _run(folder: Path, step: int) -> tuple[dict, dict[str, float], set[str]]:
  """Returns (config, the results saved with a step, which of them are fractions).

  A result is a number of an evaluation that says how good the model is: neither a time,
  nor a count, nor what a train step measured.
  """
  from vit_jax import evaluators, run_config
  from vit_jax.weights import runs

  config = run_config.read(folder)
  evals, results, percent = config.get('evals', {}), {}, set()
  for name, value in (runs.Steps(folder, config).metrics.get(step) or {}).items():
    declared = evaluators.declared(name, evals)
    of_evaluation = name.partition('/')[0] in evals
    if of_evaluation and declared.larger_is_better is not None and math.isfinite(value):
      results[name] = value
      percent |= {name} if declared.percent else set()
  return config, results, percent


def _model(found, config: dict | None) -> str:
  variant = (config or {}).get('model', {}).get('variant')
  return f'{found.family}:{variant}' if variant else found.family


def _base(source: str) -> str | None:
  """Returns 'OWNER/NAME' of weights on the hub, None for others."""
  match = re.fullmatch(r'hf:([^@]+)(@.*)?', source)
  return match[1] if match else None


def _write_json(path: Path, value: dict) -> None:
  from vit_jax.train import metrics

  metrics.write_json(path, value)


def _parser() -> cli.Parser:
  parser = cli.Parser(prog='vit_jax push', description=__doc__.split('\n')[0])
  source.add_options(parser, variant=False, resolution=False)
  parser.add_argument('repo', metavar='OWNER/NAME', help='on huggingface.co')
  parser.add_argument('--format', choices=FORMATS, help='default: the first that fits')
  parser.add_argument(
    '--private', action='store_true', help='if the repository is made'
  )
  parser.add_argument(
    '--license', metavar='ID', help="stated in the card: 'apache-2.0'"
  )
  parser.add_argument('--dry_run', action='store_true', help='write the folder only')
  parser.add_argument(
    '--out', metavar='FOLDER', help='where it is kept; with --dry_run NAME by default'
  )
  parser.add_argument(
    '--replace_card', action='store_true', help="over the repository's README.md"
  )
  parser.add_argument('--message', help='of the commit')
  cli.add_json_option(parser)
  return parser


if __name__ == '__main__':
  sys.exit(cli.run(main))
