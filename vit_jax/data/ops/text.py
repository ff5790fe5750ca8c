"""The op that makes token ids of captions. It runs in Python, before the ops of TensorFlow."""

import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from vit_jax.check import Count
from vit_jax.data.features import Feature
from vit_jax.data.ops.registry import op
from vit_jax.errors import BadImage, UserError
from vit_jax.text import tokenizer


@op('tokenize', draws=1, maps=('text',))
class Tokenize:
  """Makes token ids of the captions of an image: 'text', int32 [length].

  Each epoch draws one of several captions anew. `captions=n` takes the first n instead, as
  int32 [n, length]; the feature text_mask, float32 [n], is 0 where there are fewer.

  Args:
    vocab: the folder of a vocabulary, see `text.tokenizer.read`; 'bytes' for the bytes of
      UTF-8. None: a run that starts from weights takes their vocabulary, and with it the
      arguments below.
    length: number of tokens. Longer captions are cut, and keep their end token.
    clean: how texts are cleaned, a key of `text.tokenizer.CLEAN`.
    pad: the token after the end token; None: the end token again.
    captions: number of captions of an image; None: one, drawn at random.
  """

  def __init__(
    self,
    vocab: str | None = None,
    length: Count = 64,
    clean: Literal[tuple(tokenizer.CLEAN)] = 'none',
    pad: int | None = None,
    captions: Count | None = None,
  ):
    self.vocab, self.captions = vocab, captions
    self.rules = tokenizer.Rules(length, clean, pad)
    self.draws = 0 if captions else 1
    self.features = {'text': Feature((length,))}
    if captions:
      self.features = {
        'text': Feature((captions, length)),
        'text_mask': Feature((captions,), 'float32'),
      }

  @functools.cached_property
  def tokenizer(self) -> tokenizer.Tokenizer:
    """The tokenizer; raises UserError if there is no vocabulary."""
    if self.vocab is None:
      raise UserError(
        "tokenize names no vocabulary: write tokenize('bytes'), the folder of a vocabulary, "
        'or start from weights with a text tower.'
      )
    return tokenizer.read(self.vocab, self.rules)

  def __call__(self, features, u):
    return features

  def ids(self, texts: Sequence[str], u: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the features of an image with these captions; u is [draws], in [0, 1)."""
    if not len(texts):
      raise BadImage('has no caption')
    if self.captions is None:
      (ids,) = self.tokenizer([texts[int(u[0] * len(texts))]])
      return {'text': ids}
    ids = self.tokenizer(texts[: self.captions])
    lacks = self.captions - len(ids)
    mask = np.ones(len(ids), np.float32)
    return {
      'text': np.pad(ids, ((0, lacks), (0, 0))),
      'text_mask': np.pad(mask, (0, lacks)),
    }
