"""Classes that are texts, for weights of an image and a text tower: --labels, --templates."""

import argparse
from collections.abc import Sequence

from vit_jax.errors import UserError

_TEMPLATES = "prompts with a place {} for the label: 'openai', 'simple', a text, a file"


def add_options(parser: argparse.ArgumentParser) -> None:
  """Adds --labels and --templates."""
  add = parser.add_argument
  add('--labels', metavar='TEXT,TEXT,...', help='classes of CLIP or SigLIP; or a file')
  add('--templates', metavar='HOW', help=_TEMPLATES)


def add_zero_shot(parser: argparse.ArgumentParser) -> None:
  """Adds --zero_shot and --templates, for classes of a data set."""
  add = parser.add_argument
  add('--zero_shot', action='store_true', help="CLIP or SigLIP on the data's classes")
  add('--templates', metavar='HOW', help=f"{_TEMPLATES}; default: 'openai'")


def is_pair(loaded) -> bool:
  """Whether `loaded` also has a text tower."""
  from vit_jax.weights.image_text import ImageText

  return isinstance(loaded, ImageText)


def classifier(args: argparse.Namespace, loaded):
  """Returns weights with the classes that --labels names, or as they are without it."""
  from vit_jax.text import prompts

  if args.labels:
    return _with_texts(args, loaded, prompts.labels(args.labels), args.templates)
  if args.templates:
    raise UserError('--templates are for --labels: give both.')
  if is_pair(loaded):
    raise UserError(
      f"{args.source} compares images with texts: --labels 'a cat,a dog' are its classes."
    )
  return loaded


def classifier_of_data(args: argparse.Namespace, loaded, data: dict):
  """Returns weights with the classes of a data set, if --zero_shot asks for them."""
  from vit_jax.data import sources
  from vit_jax.text import prompts

  if not args.zero_shot:
    if args.templates:
      raise UserError('--templates are for --zero_shot: give both.')
    if is_pair(loaded):
      raise UserError(f'{args.source} compares images with texts: --zero_shot.')
    return loaded
  keys = ('source', 'split', 'classes')
  opened = sources.build(
    **{k: data[k] for k in keys if k in data}, **data.get('source_options', {})
  )
  if not opened.class_names:
    raise UserError(f'{data["source"]} has no names of its classes for --zero_shot.')
  names = list(opened.class_names)
  templates = args.templates or 'openai'
  return _with_texts(args, loaded, prompts.words(names), templates, names)


def _with_texts(args, loaded, labels: Sequence[str], templates, names=None):
  from vit_jax.text import prompts

  if not is_pair(loaded):
    raise UserError(f'{args.source} has no text tower, as CLIP and SigLIP have.')
  return loaded.classifier(labels, prompts.templates(templates), names)
