"""Templates, labels, and the published names of ImageNet's classes."""

import pytest

from tests.support import naming
from vit_jax import imagenet
from vit_jax.errors import UserError
from vit_jax.text import prompts


def test_published_templates():
  openai, simple = map(prompts.templates, prompts.TEMPLATES)
  assert (len({*openai}), len(simple)) == (80, 7)
  assert {*simple} < {*openai}
  assert all(t.count('{}') == 1 for t in openai)
  assert prompts.templates(None)[0].format('cat') == 'cat'


def test_templates_and_labels_of_a_file(tmp_path):
  file = tmp_path / 'lines.txt'
  file.write_text('a {}\n\nthe {}, of course\n')
  assert prompts.templates(str(file)) == ['a {}', 'the {}, of course']
  assert prompts.templates('my {}') == ['my {}']
  assert prompts.labels(str(file)) == ['a {}', 'the {}, of course']
  assert prompts.labels('a cat, a dog') == ['a cat', 'a dog']
  file.write_text('a photo')
  for wrong in (str(file), 'opena1'):
    with pytest.raises(UserError, match=naming(wrong)):
      prompts.templates(wrong)
  for wrong in ('a cat,a cat', 'a cat,'):
    with pytest.raises(UserError, match=naming(wrong)):
      prompts.labels(wrong)


def test_classes_of_imagenet_have_edited_names():
  ids, ours = imagenet.wordnet_ids('imagenet1k'), imagenet.class_names('imagenet1k')
  edited = prompts.words(ids)
  assert prompts.words(ours) == edited
  assert len({*edited}) > 990
  # Known places of both lists; the second one is renamed in OpenAI's.
  assert [edited[i] for i in (0, 134, 207, 517)] == [
    *('tench', 'crane bird', 'Golden Retriever', 'construction crane')
  ]
  # A part of the classes, and others: the published name, or the words.
  assert prompts.words([ids[134], 'school_bus']) == ['crane bird', 'school bus']
