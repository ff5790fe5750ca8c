"""Token ids beside those of transformers and open_clip. Run by `make peer`."""

import gzip
import json
import random

import pytest

from tests.support.peers import MARKS
from vit_jax.text import tokenizer

pytestmark = MARKS

LETTERS = 'abcdefghijklmnopqrstuvwxyz'
ALPHABETS = (
  *(
    LETTERS,
    LETTERS.upper(),
    'éèüßñçåøłşğİıſ',
    'αβγδΣσςΩ',
    'бвгдЖщ',
    '漢字仮名ひらカナ',
  ),
  *(
    '한국어',
    'ابتث',
    'नमस्ते',
    '😀🎉👩\u200d👩',
    '0123456789٣²½',
    'ﬁﬂ①ⅷ',
    'e\u0301a\u0308',
  ),
  *('.,;:!?\'"()[]{}-_/\\@#$%^&*+=<>|~`', '“”‘’–—…«»', '  \t\n\u00a0\u2003'),
)


def texts(number=200):
  """Returns texts in many alphabets, some of them too long."""
  rng = random.Random(0)

  def text():
    some = (ALPHABETS[0] + '   ', *ALPHABETS, *ALPHABETS[:1] * 9)
    return ''.join(rng.choice(rng.choice(some)) for _ in range(rng.randint(1, 90)))

  return ['a photo of a school_bus.', "IT'S &amp; <b>'ll", '', *map(str, range(9))] + [
    text() for _ in range(number)
  ]


def agree(folder, rules, theirs, some):
  ours = tokenizer.read(folder, tokenizer.Rules(*rules))(some).tolist()
  wrong = [s for s, a, b in zip(some, ours, theirs, strict=True) if a != list(b)]
  assert not wrong


@pytest.fixture(scope='module')
def merges():
  """The path of OpenAI's merges, in the package of open_clip."""
  open_clip = pytest.importorskip('open_clip')
  return open_clip.tokenizer.default_bpe()


def test_clip_of_transformers(transformers, merges, tmp_path):
  with gzip.open(merges, 'rt', encoding='utf-8') as file:
    pairs = [line.split() for line in file.read().split('\n')[1 : 49152 - 258 + 1]]
  theirs = pytest.importorskip('open_clip').SimpleTokenizer(merges)
  words = [*theirs.encoder][:-2] + ['<|startoftext|>', '<|endoftext|>']
  vocab = {word: i for i, word in enumerate(words)}
  fast = transformers.CLIPTokenizer(vocab=vocab, merges=list(map(tuple, pairs)))
  fast.save_pretrained(tmp_path)
  ids = fast(texts(), padding='max_length', truncation=True, max_length=77)['input_ids']
  agree(tmp_path, (77, 'none', None), ids, texts())


def test_open_clip(merges, tmp_path):
  ftfy, open_clip = map(pytest.importorskip, ('ftfy', 'open_clip'))
  (tmp_path / tokenizer.MERGES).symlink_to(merges)
  whole = [ftfy.fix_text(text) for text in texts()]  # which ours does not do
  ids = open_clip.SimpleTokenizer(merges)(whole).tolist()
  agree(tmp_path, (77, 'lower', 0), ids, whole)


def test_siglip_of_transformers(transformers, tmp_path):
  sentencepiece = pytest.importorskip('sentencepiece')
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter([' '.join(text.split()) for text in texts()]),
    model_prefix=str(tmp_path / 'spiece'),
    vocab_size=300,
    character_coverage=0.98,
    minloglevel=9,
    **dict(eos_id=1, unk_id=2, bos_id=-1, pad_id=0),
  )
  theirs = transformers.SiglipTokenizer(str(tmp_path / 'spiece.model'))
  ids = theirs(texts(), padding='max_length', truncation=True, max_length=64)
  agree(tmp_path, (64, 'siglip', None), ids['input_ids'], texts())


def test_siglip2_of_transformers(transformers, tmp_path):
  tokenizers = pytest.importorskip('tokenizers')
  fast = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
  special = ['<pad>', '<eos>', '<bos>', '<unk>', '<mask>', '</s>']
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=800,
    special_tokens=special + [f'<0x{i:02X}>' for i in range(256)],
    show_progress=False,
  )
  fast.normalizer = tokenizers.normalizers.Replace(' ', '▁')
  fast.train_from_iterator([text.lower() for text in texts(100)], trainer)
  fast.save(str(tmp_path / 'trained.json'))
  theirs = transformers.Siglip2Tokenizer(
    vocab=fast.get_vocab(),
    merges=_merges(tmp_path / 'trained.json'),
    add_bos_token=False,
    add_eos_token=True,
  )
  theirs.save_pretrained(tmp_path)
  options = dict(padding='max_length', truncation=True, max_length=64)
  ids = theirs(texts(), padding_side='right', **options)['input_ids']
  agree(tmp_path, (64, 'siglip2', 0), ids, texts())


def _merges(path):
  return list(map(tuple, json.loads(path.read_text())['model']['merges']))
