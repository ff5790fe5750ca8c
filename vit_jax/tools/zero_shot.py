"""Zero-shot classes, for weights with an image and a text tower: --labels, --templates."""

import argparse

from vit_jax.errors import UserError

_TEMPLATES = "prompts with a place {} for the label: 'openai', 'simple', a text, a file"


def add_options(parser: argparse.ArgumentParser) -> None:
  """Adds --labels and --templates."""
  add = parser.add_argument
  add('--labels', metavar='TEXT,TEXT,...', help='classes of CLIP or SigLIP; or a file')
  add('--templates', metavar='HOW', help=_TEMPLATES)


def add_zero_shot(parser: argparse.ArgumentParser) -> None:
  """Adds --zero_shot and --templates, for the classes of a data set."""
  add = parser.add_argument
  add('--zero_shot', action='store_true', help="CLIP or SigLIP on the data's classes")
  add('--templates', metavar='HOW', help=f"{_TEMPLATES}; default: 'openai'")


def is_pair(loaded) -> bool:
  """Whether `loaded` also has a text tower."""
  from vit_jax.weights.image_text import ImageText

  return isinstance(loaded, ImageText)


def classifier(args: argparse.Namespace, loaded, data: dict | None = None):
  """Makes a classifier of texts if the options ask for it; otherwise returns the weights.

  Its classes are those of --labels or, with `data` and --zero_shot, those of the data set.
  """
  from vit_jax.text import prompts

  chosen = args.zero_shot if data else args.labels
  if not chosen:
    flag = '--zero_shot' if data else "--labels 'a cat,a dog'"
    if args.templates:
      raise UserError(f'--templates needs {flag}: pass both.')
    if is_pair(loaded):
      raise UserError(f'{args.source} compares images with texts: pass {flag}.')
    return loaded
  names = _class_names(data) if data else prompts.labels(args.labels)
  if not is_pair(loaded):
    raise UserError(f'{args.source} has no text tower, unlike CLIP and SigLIP.')
  if data is None:
    return loaded.classifier(names, prompts.templates(args.templates))
  templates = prompts.templates(args.templates or 'openai')
  return loaded.classifier(prompts.words(names), templates, names)


def _class_names(data: dict) -> list[str]:
  from vit_jax.data import sources

  options = {k: data[k] for k in ('source', 'split', 'classes') if k in data}
  opened = sources.build(**options, **data.get('source_options', {}))
  if not opened.class_names:
    raise UserError(f'{data["source"]} has no class names, which --zero_shot needs.')
  return list(opened.class_names)
