"""A small image and text model with a vocabulary."""

import json
import shutil
from pathlib import Path

import sentencepiece

from tests.support import GOLDEN


def siglip(folder: Path) -> Path:
  """Writes SigLIP's golden and a vocabulary of 20 pieces into a new folder."""
  folder.mkdir()
  shutil.copy(GOLDEN / 'siglip_bigvision.npz', folder / 'w.npz')
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(['a cat', 'two dogs in the snow', 'a photo of snow'] * 9),
    model_prefix=str(folder / 'spiece'),
    vocab_size=20,
    minloglevel=9,
    **dict(eos_id=1, unk_id=2, bos_id=-1, pad_id=0),
  )
  return folder


def tokenizer_json(vocab: dict[str, int], replace=(), split=r'\s+') -> bytes:
  """Returns a tokenizer of words, with replacements of texts before they are split."""
  normalizers = [
    {'type': 'Replace', 'pattern': {'String': old}, 'content': new}
    for old, new in replace
  ]
  pattern = {'pattern': {'Regex': split}, 'behavior': 'Removed', 'invert': False}
  content = {
    'version': '1.0',
    'added_tokens': [],
    'normalizer': {'type': 'Sequence', 'normalizers': normalizers},
    'pre_tokenizer': {'type': 'Split', **pattern},
    'model': {'type': 'WordLevel', 'vocab': vocab, 'unk_token': 'a'},
  }
  return json.dumps(content).encode()
