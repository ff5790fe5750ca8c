"""Token ids, by vocabularies that the tests make; `make peer` compares with published ones."""

import gzip
import itertools

import numpy as np
import pytest
import sentencepiece
import tokenizers

from tests.support import naming
from tests.support.pairs import tokenizer_json
from vit_jax.errors import UserError
from vit_jax.text.tokenizer import CLEAN, MERGES, Rules, read

WORDS = [
  'a photo of a cat',
  'two dogs in the snow',
  'cats and photos of snow',
  'it is so',
]
CAT, PHOTO = (
  2 * 256 + 1,
  2 * 256 + 4,
)  # letters come first, each also as the end of a word
START = 2 * 256 + 5


@pytest.fixture
def merges(tmp_path):
  pairs = ['c a', 'ca t</w>', 'p h', 'o t', 'ph ot', '']  # a line each, after a title
  text = '\n'.join(['#version: 0.2', *pairs])
  (tmp_path / MERGES).write_bytes(gzip.compress(text.encode()))
  return tmp_path


@pytest.fixture
def pieces(tmp_path):
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(WORDS * 9),
    model_prefix=str(tmp_path / 'spiece'),
    vocab_size=24,
    minloglevel=9,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    pad_id=0,
  )
  return tmp_path


def test_merges_of_bytes(merges):
  tokenizer = read(merges, Rules(7, 'lower', 0))
  byte = lambda c, end=True: ord(c) - ord('!') + 256 * end
  ids = tokenizer(
    ['  A cat ', 'cat&amp;amp;x', 'catphoto', "cat's cat cat cat cat cat"]
  )
  assert ids.dtype == np.int32
  assert ids.tolist() == [
    [START, byte('a'), CAT, START + 1, 0, 0, 0],
    [START, CAT, byte('&'), byte('x'), START + 1, 0, 0],
    [START, CAT - 1, byte('t', False), PHOTO, byte('o'), START + 1, 0],
    [START, CAT, byte("'", False), byte('s'), CAT, CAT, START + 1],  # cut, with an end
  ]


def test_merges_end_where_clip_stops_reading(tmp_path):
  # Its file has 262,145 lines; 49,408 ids are 512 bytes, 48,894 merges and two ends.
  firsts = map(chr, [*range(33, 127), *range(161, 173), *range(174, 256)])
  seconds = [chr(i) + end for i in range(174, 324) for end in ('', '</w>')]
  others = map(' '.join, itertools.product(firsts, seconds))
  pairs = ['c a', 'ca t</w>', *itertools.islice(others, 48_892)]
  lines = ['#version: 0.2', *pairs, 'cat</w> a']
  (tmp_path / MERGES).write_bytes(gzip.compress('\n'.join(lines).encode()))
  (ids,) = read(tmp_path, Rules(4, 'lower', 0))(['cat'])
  assert ids.tolist() == [49_406, CAT, 49_407, 0]


def test_a_tokenizer_json_brings_its_own_cleaning_and_ends(tmp_path):
  vocab = {'a': 0, 'cat': 1, '</s>': 2, '<eos>': 3, '?': 4}
  fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, '?'))
  fast.normalizer = tokenizers.normalizers.Lowercase()
  fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  fast.enable_truncation(2)
  fast.save(str(tmp_path / 'tokenizer.json'))
  end = 3  # Gemma's end, although its vocabulary has the HTML tag, too
  assert read(tmp_path, Rules(4, 'none', None))(['A Cat']).tolist() == [
    [0, 1, end, end]
  ]
  assert read(tmp_path, Rules(3, 'none', 0))(['a a cat']).tolist() == [[0, 0, end]]
  (tmp_path / 'tokenizer.json').write_text('{"model": 3}')
  with pytest.raises(UserError, match=naming('tokenizer.json')):
    read(tmp_path, Rules(4, 'none', None))


def test_pieces_end_and_are_padded_by_the_end(pieces):
  import sentencepiece

  model = sentencepiece.SentencePieceProcessor(str(pieces / 'spiece.model'))
  tokenizer = read(pieces, Rules(12, 'siglip', None))
  ids = tokenizer(['A_Photo of, "a" CAT!', 'a photo of a cat ' * 9])
  assert ids[0].tolist() == (model.encode('aphoto of a cat') + [1] * 12)[:12]
  assert ids[1].tolist() == model.encode('a photo of a cat ' * 9)[:11] + [1]
  spaced = read(pieces, Rules(12, 'big_vision', None))(['A_Photo of, "a" CAT!'])
  assert spaced[0].tolist() == (model.encode('a photo of a cat') + [1] * 12)[:12]


@pytest.mark.parametrize(
  ('how', 'expected'),
  [
    ('none', " It's&amp;amp;a_ΔΟΣ "),
    ('lower', "it's&a_δος"),
    ('whitespace', "It's&a_ΔΟΣ"),
    ('canonicalize', 'itsa δος'),
    ('big_vision', 'itsampampa δος'),
    ('siglip', 'itsampampaδος'),
    ('siglip2', " it's&amp;amp;a_δοσ "),
  ],
)
def test_cleaning(how, expected):
  assert CLEAN[how](" It's&amp;amp;a_ΔΟΣ ") == expected


def test_texts_are_a_list_and_folders_have_a_vocabulary(merges, tmp_path_factory):
  with pytest.raises(UserError, match='list'):
    read(merges, Rules(7, 'lower', 0))('a cat')
  with pytest.raises(UserError, match=naming('spiece.model', MERGES)):
    read(tmp_path_factory.mktemp('empty'), Rules(7, 'lower', 0))


def zip_merges(*lines) -> bytes:
  return gzip.compress('\n'.join(['#version: 0.2', *lines]).encode())


VOCAB = {'a': 0, 'cat': 1, '</s>': 2}
# (content of the vocabulary, a text, words of the error)
HOSTILE = {
  'a merge of an unknown word': (zip_merges('xy z'), 'cat', ('xy',)),
  'NUL': (zip_merges('\0 a'), 'cat', (MERGES,)),
  'decompresses to 100 MB': (zip_merges('a' * 10**8), 'cat', ('20 times',)),
  'no UTF-8': (zip_merges('c a'), 'caf\udce9', ('udce9', 'UTF-8')),
  'an id of 32 bits': (tokenizer_json(VOCAB | {'cat': 2**32 - 1}), 'cat', ('int32',)),
  '10**9 letters': (
    tokenizer_json(VOCAB, [('a', 'a' * 10)] * 9),
    'a',
    ('1,000,000,000',),
  ),
  'a pattern without end': (
    tokenizer_json(VOCAB, split='(a+)+$'),
    'a' * 40 + 'b',
    ('retry',),
  ),
}


@pytest.mark.parametrize('case', HOSTILE)
def test_hostile_vocabularies_and_texts_are_one_line(case, tmp_path):
  content, text, words = HOSTILE[case]
  name = 'tokenizer.json' if content.startswith(b'{') else MERGES
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UserError, match=naming(*words)) as caught:
    read(tmp_path, Rules(4, 'none', 0))([text])
  assert '\n' not in str(caught.value)


def test_replacements_of_one_letter_are_no_growth(tmp_path):
  content = tokenizer_json(VOCAB, [(' ', '▁'), ('é', 'e')])
  (tmp_path / 'tokenizer.json').write_bytes(content)
  assert read(tmp_path, Rules(3, 'none', 0))(['cat']).tolist() == [[1, 2, 0]]


def test_pieces_without_an_end_are_refused(tmp_path):
  spm = pytest.importorskip('sentencepiece')
  words = dict(sentence_iterator=iter(WORDS * 9), model_prefix=str(tmp_path / 'spiece'))
  ids = dict(eos_id=-1, unk_id=0, bos_id=-1, pad_id=-1)
  spm.SentencePieceTrainer.train(**words, vocab_size=20, minloglevel=9, **ids)
  with pytest.raises(UserError, match=naming('spiece.model', 'ends')):
    read(tmp_path, Rules(4, 'siglip', None))
