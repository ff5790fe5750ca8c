"""Evaluators of image and text towers in training: zero-shot classification and retrieval."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import sharding
from vit_jax.data.ops import registry
from vit_jax.errors import UserError
from vit_jax.evaluators import knn
from vit_jax.evaluators.base import Metric, OneSplit, run_steps
from vit_jax.evaluators.class_match import Classes
from vit_jax.evaluators.classification import Classification
from vit_jax.text import prompts

# Numbers of neighbours among which retrieval looks for a pair.
NEIGHBOURS = (1, 5, 10)


def _check_tokens(where: str, text: str, _=None) -> None:
  if [op.name for op in registry.parse(text)] != ['tokenize']:
    raise UserError(f"{where}={text!r}: expected tokenize('bytes', 64) or the like.")


def prototypes(vectors: np.ndarray) -> np.ndarray:
  """Returns the vectors of classes [K, E], the means of unit vectors of prompts [K, T, E]."""
  means = vectors.mean(1)
  return means / np.linalg.norm(means, axis=1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class _Scores:
  """A `predict` that compares images with prototypes. Equal ones share a compilation."""

  predict: Callable

  def __call__(self, variables, batch) -> dict:
    images = self.predict(variables['task'], batch)['image']
    y = jnp.dot(images, variables['prototypes'].T, precision='highest')
    return {'logits': variables['scale'] * y + variables['bias']}


class ZeroShot(Classification):
  """Accuracy of classes that are known by their names alone.

  The vector of a class is the mean of the unit vectors of its prompts, of unit length again
  (CLIP, arXiv 2103.00020, section 3.1.4). The class of the nearest vector wins.
  """

  TASKS = ('pairs',)

  def __init__(
    self,
    mesh,
    check_stop,
    model=None,
    *,
    tokens: Annotated[str, _check_tokens] = 'tokenize',
    names: str | None = None,
    templates: str = 'openai',
    **options,
  ):
    """Opens the data; `options` are those of `Classification`.

    Args:
      tokens: the op `tokenize` of the training data.
      names: the classes to choose from, 'a cat,a dog' or a file with one per line, which are
        matched with those of the data; None: the classes of the data.
      templates: prompts, see `text.prompts.templates`.
    """
    del model
    words = prompts.labels(names) if names else None
    classes = Classes(words, len(words)) if words else None
    super().__init__(mesh, check_stop, classes, **options)
    source = self.batches.source
    if words is None and source.class_names is None:
      raise UserError(f'{source.name} has no class names: set names of the evaluation.')
    words = words or prompts.words(source.class_names)
    (op,) = registry.parse(tokens)
    self._templates = prompts.templates(templates)
    texts = [t.replace('{}', word) for word in words for t in self._templates]
    self._ids = op.apply.tokenizer(texts)
    self._embed = jax.jit(
      lambda predict, variables, batch: predict(variables, batch),
      static_argnums=0,
      out_shardings=sharding.replicated_sharding(mesh),
    )

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Embeds the prompts, and returns the numbers of `Classification`."""
    step = lambda batch: self._embed(predict, variables, batch)
    parts = [*run_steps(step, self._texts(), self.mesh, self.check_stop)]
    vectors = np.concatenate([part['text'] for part in parts])[: len(self._ids)]
    vectors = vectors.reshape(-1, len(self._templates), vectors.shape[-1])
    scores = {key: parts[0][key] for key in ('scale', 'bias')}
    scores |= {'task': variables, 'prototypes': prototypes(vectors)}
    return super().run(_Scores(predict), scores)

  def _texts(self):
    """Yields this host's parts of batches of prompts; the last batch repeats its last row."""
    size, host = self.batches.batch_size, sharding.host_of_batch(self.mesh)
    for first in range(0, len(self._ids), size):
      ids = self._ids.take(range(first, first + size), axis=0, mode='clip')
      yield {'text': np.split(ids, host['hosts'])[host['host']]}


class Retrieval(OneSplit):
  """The share of images whose nearest texts include one of their captions, and the reverse.

  An image has up to n captions, by tokenize(captions=n) in `data.pp`.
  """

  TASKS = ('pairs',)
  METRICS: ClassVar = {
    r'(image_to_text|text_to_image)_\d+': Metric(percent=True, larger_is_better=True),
    '(examples|texts|bad_images)': Metric(),
  }

  def __init__(self, mesh, check_stop, model=None, **options):
    """Opens the data; `options` are those of `OneSplit`."""
    super().__init__(mesh, check_stop, model, **options)
    if 'text_mask' not in self.batches.spec:
      raise UserError(
        'retrieval compares all captions: write tokenize(captions=5) in pp.'
      )

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns {'image_to_text_1', 'text_to_image_1': recall, ... of 5 and 10 neighbours}."""
    images, texts, owners, number = [], [], [], 0
    for image, text, mask in self.run_steps(predict, variables):
      rows, captions = np.nonzero(mask)
      read = np.unique(rows)
      images.append(image[read])
      texts.append(text[rows, captions])
      owners.append(number + np.searchsorted(read, rows))
      number += len(read)
    image, text, owner = (np.concatenate(x) for x in (images, texts, owners))
    numbers = recall(image, text, owner, self.mesh, self.check_stop)
    return self.add_counts(numbers | {'texts': len(text)}, number, number)

  def measure(self, predict, variables, batch) -> tuple:
    """Returns the vectors of a batch, [B, E] and [B, C, E], and whether they are real [B, C]."""
    batch = self.batches.finish_on_device(batch)
    out = predict(variables, batch)
    return out['image'], out['text'], batch['text_mask'] * batch['mask'][:, None]


def recall(
  image: np.ndarray, text: np.ndarray, owner: np.ndarray, mesh, check_stop=lambda: None
) -> dict[str, float]:
  """Returns recall among the nearest 1, 5 and 10 by cosine, in both directions.

  Args:
    image: [N, E]. NaN among the vectors makes all numbers NaN.
    text: [T, E].
    owner: int [T], the image of each text.
  """
  most, numbers = max(NEIGHBOURS), {}
  for name, keys, queries in (
    ('image_to_text', text, image),
    ('text_to_image', image, text),
  ):
    k = min(most, len(keys))
    similarities, rows = knn.nearest(keys, queries, k, mesh, check_stop)
    if keys is text:
      hits = owner[rows] == np.arange(len(image))[:, None]
    else:
      hits = rows == owner[:, None]
    for k in NEIGHBOURS:
      share = float(hits[:, :k].any(1).mean())
      numbers[f'{name}_{k}'] = share if np.isfinite(similarities).all() else np.nan
  return numbers
