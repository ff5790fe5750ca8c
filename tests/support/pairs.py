"""A small image and text model with a vocabulary."""

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
