"""An image and a text tower: the result of `vit_jax.load` for CLIP and SigLIP."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import check, terminal, trees
from vit_jax.errors import UserError
from vit_jax.models.text import TextTransformer, TwoTowers
from vit_jax.text import tokenizer
from vit_jax.weights.families import text
from vit_jax.weights.loaded import Loaded
from vit_jax.weights.source import Source

_BATCH = 256  # maximum number of texts per step


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class ImageText(Loaded):
  """An image tower, with the text tower that it was trained with.

  `model` and `variables` are those of the image tower, which can be used like any other
  model. Its outputs are vectors that can be compared with those of texts. `image` and `text`
  compute vectors, `logits` compares them, and `classifier` makes a head from texts.
  """

  towers: TwoTowers
  beside: dict[str, Any]  # the parameters of `towers`, except those of the image tower
  rules: tokenizer.Rules
  folder: Path | str  # the folder of the vocabulary, see `tokenizer.read`

  @functools.cached_property
  def tokenizer(self) -> tokenizer.Tokenizer:
    """The tokenizer, which maps texts to ids [T, N].

    Its vocabulary is stored beside the weights.
    """
    return tokenizer.read(self.folder, self.rules)

  @functools.cached_property
  def _variables(self) -> dict:
    variables = {kind: {'image': tree} for kind, tree in self.variables.items()}
    variables['params'] |= self.beside
    return jax.device_put(variables)

  @functools.cached_property
  def _compiled(self):
    return jax.jit(self.towers.apply, static_argnames='method')

  def image(self, images) -> np.ndarray:
    """Returns the unit vectors [B, E] of images, which may be preprocessed already."""
    if not jnp.issubdtype(getattr(images, 'dtype', object), jnp.floating):
      images = self.preprocess(images)
    return np.asarray(self._compiled(self._variables, images, method='embed_images'))

  def text(self, texts: Iterable[str]) -> np.ndarray:
    """Returns the unit vectors [T, E] of texts."""
    ids = self.tokenizer(texts)
    try:
      return self.embed_ids(ids)
    except ValueError as error:
      raise UserError(f'{self.tokenizer.path}: {error}.') from None

  def embed_ids(self, ids: np.ndarray) -> np.ndarray:
    """Returns the unit vectors [T, E] of texts, given as token ids int [T, N]."""
    vocab, rows = self.towers.text.vocab, []
    if odd := [i for i in np.unique(ids) if not 0 <= i < vocab]:
      raise ValueError(
        f'the token id {odd[0]} is not one of the {vocab} of the weights: put the '
        'vocabulary that they were trained with into their folder'
      )
    for part in (ids[i : i + _BATCH] for i in range(0, len(ids), _BATCH)):
      # Pad to a power of 2, because each size is compiled.
      size = 1 << (len(part) - 1).bit_length()
      padded = np.pad(part, ((0, size - len(part)), (0, 0)))
      y = self._compiled(self._variables, padded, method='embed_texts')
      rows.append(np.asarray(y)[: len(part)])
    return np.concatenate(rows)

  def logits(self, images, texts: Iterable[str]) -> np.ndarray:
    """Returns the logits [B, T] of images and texts, scaled as in training."""
    scale, bias = self._scale_and_bias
    return scale * self.image(images) @ self.text(texts).T + bias

  @property
  def _scale_and_bias(self) -> tuple:
    return np.exp(self.beside['logit_scale']), self.beside.get('logit_bias', 0.0)

  def classifier(
    self,
    labels: Sequence[str],
    templates: Sequence[str] = ('{}',),
    class_names: list[str] | None = None,
  ) -> Loaded:
    """Makes a classifier without training: the image tower with a head computed from texts.

    The vector of a class is the mean of the unit vectors of its prompts, scaled to unit
    length (CLIP, arXiv 2103.00020, section 3.1.4). The classifier's logits are those of
    `logits`.

    Args:
      labels: a text for each class.
      templates: prompts, in which {} stands for the label.
      class_names: names of the classes; None: the labels.
    """
    T, means = len(templates), []
    step = max(_BATCH // T, 1)
    starts = terminal.progress(range(0, len(labels), step), None, 'texts', 'batches')
    for part in (labels[i : i + step] for i in starts):
      vectors = self.text([t.replace('{}', label) for label in part for t in templates])
      means.append(vectors.reshape(len(part), T, -1).mean(1))
    means = np.concatenate(means)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    scale, bias = self._scale_and_bias
    params, outputs = dict(self.params), self.model.num_classes
    if outputs is not None:
      # The projections of EVA and of ResNets have a bias, which replaces the zeros.
      zeros = np.zeros(outputs, np.float32)
      params['projection'] = {'bias': zeros, **params.pop('head')}
    kernel = (scale * means.T).astype(np.float32)  # [E, K]
    params['head'] = {'kernel': kernel, 'bias': np.full(len(labels), bias, np.float32)}
    fields = dict(head_bias=True, projection=outputs, unit=True)
    model = self.model.change(num_classes=len(labels), **fields)
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(Loaded)}
    fields |= dict(model=model, class_names=class_names or list(labels))
    return Loaded(**fields | dict(variables={**self.variables, 'params': params}))


def complete_task(section: dict, source: Source) -> tuple[dict, str]:
  """Fills a section `task` on pairs from weights with a text tower, and returns it.

  Returns:
    (section, the op that tokenizes texts for this tower). The section's own keys win.
  """
  read = text.read(source.text, source.fields)
  loss = 'sigmoid' if 'logit_bias' in read.scalars else 'softmax'
  length, clean, pad = read.rules
  folder = str(source.text.folder)
  op = f'tokenize({folder!r}, {length}, clean={clean!r}, pad={pad})'
  return {'text': read.fields, 'loss': loss, **section}, op


def own_parameters(source: Source, key: str) -> dict[str, np.ndarray]:
  """Returns the parameters of the text tower, with the scalars of logits, below `key`."""
  read = text.read(source.text, source.fields)
  flat = {f'text/{name}': x for name, x in read.flat.items()} | read.scalars
  return {f'{key}/{name}': x for name, x in flat.items()}


def pair(loaded: Loaded, source: Source) -> Loaded:
  """Combines an image tower with the text tower of its file, if that can be read."""
  try:
    read = text.read(source.text, source.fields)
    check.bind('text tower', read.fields, TextTransformer)
  except ValueError as error:
    return dataclasses.replace(loaded, report=f'{loaded.report}\n  no texts: {error}')
  tower = TextTransformer(**read.fields)
  return ImageText(
    **vars(loaded),
    towers=TwoTowers(loaded.model, tower, bias='logit_bias' in read.scalars),
    beside={'text': trees.unflatten_variables(read.flat)['params'], **read.scalars},
    rules=read.rules,
    folder=source.text.folder,
  )
