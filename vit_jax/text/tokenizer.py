"""Converts texts to token ids, with the vocabulary of the weights.

The ids equal those of the publishers' code. OpenAI's CLIP, transformers, open_clip and
big_vision clean, truncate and pad texts in different ways.
"""

import gzip
import html
import json
import math
import string
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax import files
from vit_jax.errors import UserError, one_line

# The vocabulary of the 256 bytes and an end token, which needs no file.
BYTES = 'bytes'
# The vocabulary of OpenAI's CLIP: a title, then the merges, the most frequent first.
MERGES = 'bpe_simple_vocab_16e6.txt.gz'
# Number of merges that CLIP uses, out of those in the file.
_NUMBER = 49_152 - 256 - 2
# OpenAI's pattern ignores case, so that a long s (ſ) counts as an s.
_WORDS = r"'[sſ]|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
# Tokens that end a text: CLIP's, which has two names, Gemma's (SigLIP 2) and T5's (SigLIP).
_ENDS = ('<|endoftext|>', '<end_of_text>', '<eos>', '</s>')
# The most that the file of merges may decompress to, times its size, and that a
# tokenizer.json may lengthen a letter.
_EXPANSION, _MOST_GROWTH = 20, 100
_PUNCTUATION = str.maketrans('', '', string.punctuation)


def _spaces(text: str) -> str:
  return ' '.join(text.split())


def _unescape(text: str) -> str:
  return html.unescape(html.unescape(unicodedata.normalize('NFC', text)))


def _canonical(text: str) -> str:
  return _spaces(text.replace('_', ' ').translate(_PUNCTUATION).lower())


# How to clean texts before cutting them into tokens.
CLEAN: dict[str, Callable[[str], str]] = {
  # CLIP in transformers: tokenizer.json cleans the text.
  'none': lambda text: text,
  # Three methods under their names in open_clip. OpenAI uses the first one.
  'lower': lambda text: _spaces(_unescape(text)).lower(),
  'whitespace': lambda text: _spaces(_unescape(text)),
  'canonicalize': lambda text: _canonical(_unescape(text)),
  # SigLIP in big_vision.
  'big_vision': _canonical,
  # SigLIP in transformers.
  'siglip': lambda text: _spaces(text.lower().translate(_PUNCTUATION)),
  # SigLIP 2 in transformers and big_vision. Lower-cases letter by letter, so that a final
  # sigma in Greek becomes the same letter as any other sigma.
  'siglip2': lambda text: ''.join(map(str.lower, text)),
}


class Rules(NamedTuple):
  """The facts about tokens that the config of the weights has, and the vocabulary lacks."""

  # Number of ids per text.
  length: int
  # A key of CLEAN.
  clean: str
  # The id that pads a text after its end token; None: the end token again.
  pad: int | None


class Tokenizer:
  """Converts texts to ids int32 [T, length], truncated or padded, each with an end token.

  `path` is the file of the vocabulary, and `size` its number of tokens.
  """

  def __init__(
    self,
    path: Path | str,
    encode: Callable[[str], list[int]],
    end: int,
    size: int,
    rules: Rules,
  ):
    self.path, self._encode, self._end, self.rules = path, encode, end, rules
    self.size = size

  def __call__(self, texts: Iterable[str]) -> np.ndarray:
    """Returns the ids of texts."""
    if isinstance(texts, str):
      raise UserError(f'texts is one text, {texts[:40]!r}: put it in a list.')
    rows, length = [], self.rules.length
    pad = self._end if self.rules.pad is None else self.rules.pad
    for text in texts:
      ids = self._encode_text(text)
      ids = ids[:-1] if ids[-1:] == [self._end] else ids
      ids = [*ids[: length - 1], self._end]
      rows.append([*ids, *[pad] * (length - len(ids))])
    with files.reading(self.path):
      return np.array(rows, np.int32).reshape(-1, length)

  def _encode_text(self, text: str) -> list[int]:
    try:
      text.encode()
      return self._encode(CLEAN[self.rules.clean](text))
    except UnicodeEncodeError:
      # The shell passes bytes that are not UTF-8 on as such letters.
      raise UserError(f'Text {text[:40]!r} is not UTF-8.') from None
    except (KeyboardInterrupt, SystemExit):
      raise
    except BaseException as error:  # Panics of Rust are not Exceptions.
      why = one_line(error)
      raise UserError(f'{self.path} cannot encode {text[:40]!r}: {why}.') from None


def read(folder: Path | str, rules: Rules) -> Tokenizer:
  """Reads the tokenizer of a folder of weights, or BYTES; raises UserError if there is none."""
  if str(folder) == BYTES:
    return Tokenizer(BYTES, lambda text: [*text.encode()], 256, 257, rules)
  folder = files.path(folder)
  readers = {
    'spiece.model': _sentencepiece,
    'tokenizer.json': _tokenizers,
    'tokenizer.model': _sentencepiece,
    MERGES: _merges,
  }
  for name, reader in readers.items():
    if (path := folder / name).is_file():
      with files.reading(path, Exception):  # The libraries raise only the base class.
        try:
          return Tokenizer(path, *reader(path), rules)
        except ImportError as error:
          raise UserError(f'{path} needs pip install vit_jax[text]: {error}.') from None
  raise UserError(f'{folder} has no vocabulary: expected {" or ".join(readers)} there.')


def _tokenizers(path: Path):
  from tokenizers import Tokenizer as Fast

  tokenizer = Fast.from_file(str(path))
  normalizer = tokenizer.normalizer
  growth = _growth(json.loads(normalizer.__getstate__())) if normalizer else 1
  if growth > _MOST_GROWTH:
    raise ValueError(f'its normalizer makes a text up to {growth:,} times as long')
  return _fast(tokenizer)


def _growth(normalizer: dict) -> int:
  """Returns the most letters that a normalizer's replacements make of one letter."""
  if normalizer['type'] == 'Precompiled':
    # A table for Unicode's NFKC, which makes up to 18 letters of one.
    return 18
  own = max(len(str(normalizer.get('content', ''))), 1)
  return math.prod(map(_growth, normalizer.get('normalizers', ())), start=own)


def _fast(tokenizer):
  tokenizer.no_truncation()
  tokenizer.no_padding()
  ends = filter(None, map(tokenizer.token_to_id, _ENDS))
  if (end := next(ends, None)) is None:
    raise ValueError(f'none of {_ENDS} is in its vocabulary')
  return lambda text: tokenizer.encode(text).ids, end, tokenizer.get_vocab_size()


def _sentencepiece(path: Path):
  from sentencepiece import SentencePieceProcessor

  pieces = SentencePieceProcessor(model_file=str(path))
  if pieces.eos_id() < 0:
    raise ValueError('it has no piece that ends a text')
  return pieces.encode, pieces.eos_id(), pieces.vocab_size()


def _merges(path: Path):
  from tokenizers import Regex, models, pre_tokenizers, processors
  from tokenizers import Tokenizer as Fast

  most = _EXPANSION * path.stat().st_size
  with gzip.open(path, 'rb') as file:
    data = file.read(most + 1)
  if len(data) > most:
    raise ValueError(f'it decompresses to more than {_EXPANSION} times its size')
  lines = data.decode().split('\n')
  merges = [tuple(line.split()) for line in lines[1 : _NUMBER + 1] if line]
  # The order of OpenAI's vocabulary: printable bytes come first, by their values.
  letters = pre_tokenizers.ByteLevel.alphabet()
  letters = sorted(letters, key=lambda c: (ord(c) > 255, c))
  start, end = '<|startoftext|>', _ENDS[0]
  words = [*letters, *(c + '</w>' for c in letters), *map(''.join, merges), start, end]
  vocab = {word: i for i, word in enumerate(words)}
  tokenizer = Fast(models.BPE(vocab, merges, end_of_word_suffix='</w>'))
  tokenizer.add_special_tokens([start, end])
  split = pre_tokenizers.Split(Regex(_WORDS), 'removed', invert=True)
  to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
  tokenizer.post_processor = processors.TemplateProcessing(
    f'{start} $A {end}', special_tokens=[(t, vocab[t]) for t in (start, end)]
  )
  return _fast(tokenizer)
