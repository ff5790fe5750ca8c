"""The documentation and the code name the same things; links lead somewhere.

The pages are read as text: `make docs` builds them, strictly, and fills the reference.
"""

import ast
import inspect
import itertools
import re
import shlex

import pytest

import vit_jax
from tests.support import documents
from tests.support.documents import generate
from vit_jax import config, errors, models, optim, tune
from vit_jax.__main__ import COMMANDS
from vit_jax.data import sources
from vit_jax.data.ops import registry
from vit_jax.evaluators import EVALUATORS
from vit_jax.train import schema

PACKAGE = documents.ROOT / 'vit_jax'
REFERENCE = documents.DOCS / 'reference'
WORDS = {'NUMBER': '19167', 'SOURCE': 'ViT-B_16.npz', 'NAME': 'mine', 'RUN': 'runs/a'}


def rendered(page: str) -> list[str]:
  """Returns the names whose docstrings are on a page of the reference."""
  return re.findall(r'^::: (\S+)$', documents.text(REFERENCE / page), re.M)


# --- pages and links ----------------------------------------------------------------


def test_every_page_is_in_the_navigation_once():
  nav = re.search(r'^nav:\n((?:  .*\n)+)', documents.text('mkdocs.yml'), re.M)[1]
  listed = re.findall(r': (\S+\.md)$', nav, re.M)
  pages = [page.relative_to(documents.DOCS).as_posix() for page in documents.PAGES]
  assert sorted(listed) == sorted(pages)


LINKING = [*documents.DOCUMENTS, documents.ROOT / 'CONTRIBUTING.md']


@pytest.mark.parametrize('path', LINKING, ids=documents.name)
def test_links_lead_somewhere(path):
  links = re.findall(r'\]\(([^)\s]+)\)', documents.without_code(path))
  for link in links:
    if link.startswith('https://'):
      continue
    target, _, anchor = link.partition('#')
    file = (path.parent / target).resolve() if target else path
    assert file.exists(), f'{documents.name(path)}: {link}'
    if path in documents.PAGES:  # the site has nothing else
      assert file.is_relative_to(documents.DOCS), f'{documents.name(path)}: {link}'
    if anchor:
      assert anchor in documents.anchors(file), f'{documents.name(path)}: {link}'


def test_the_readme_is_short_with_a_small_picture():
  assert len(documents.text('README.md').splitlines()) <= 115
  (picture,) = re.findall(r'!\[[^]]+\]\((\S+)\)', documents.text('README.md'))
  assert 10_000 < (documents.ROOT / picture).stat().st_size < 300_000


# --- names --------------------------------------------------------------------------


def test_the_reference_has_every_public_function():
  public = {
    f'vit_jax.{name}' for name, x in vars(vit_jax).items() if inspect.isfunction(x)
  }
  assert public
  assert public <= set(rendered('python.md'))


@pytest.mark.parametrize('page', ['python.md', 'config.md', 'ops.md'])
def test_what_the_reference_shows_exists_and_says_something(page):
  names = rendered(page)
  assert names
  for name in names:
    assert inspect.getdoc(generate.thing(name)), f'{page}: {name} has no docstring'


def test_the_reference_has_all_that_a_config_may_name():
  shown = {id(generate.thing(name)) for page in ('python.md', 'config.md', 'ops.md')
           for name in rendered(page)}  # fmt: skip
  assert {id(models.family(name).model) for name in models.MODELS} <= shown
  assert {id(factory) for factory in registry.OPS.values()} <= shown
  text = documents.text(REFERENCE / 'config.md')
  for name in schema.SECTIONS:
    assert re.search(rf'^\| .*`{name}`', text, re.M), name
  for method in tune.METHODS:
    assert re.search(rf'^`{method}`$', text, re.M), method
    assert any(x.startswith('vit_jax.tune.') for x in rendered('config.md'))
  assert 'vit_jax.optim.optimizers' in rendered('config.md')
  for name in optim.optimizers.OPTIMIZERS:
    assert name in documents.text('docs/guides/recipes.md')
  assert {id(EVALUATORS[name]) for name in EVALUATORS} <= shown
  data = documents.text('docs/guides/data.md')
  for scheme in sources.SOURCES:
    assert re.search(rf'^\| `{scheme}\b', data, re.M), scheme


def test_every_command_and_config_has_its_place():
  commands = documents.text(REFERENCE / 'commands.md')
  assert re.findall(r'^## \w+\n\n::: help (\w+)$', commands, re.M) == list(COMMANDS)
  assert set(re.findall(r'^vit_jax (\w+)', commands, re.M)) >= set(COMMANDS)
  for code, meaning in errors.EXIT_CODES.items():
    assert f'\n| {code} | {meaning} |\n' in commands
  names = set(config.recipes())
  configs = documents.text(REFERENCE / 'configs.md')
  assert set(re.findall(r'^::: config (\w+)$', configs, re.M)) == names
  table = documents.text('docs/guides/recipes.md')
  assert all(re.search(rf'`(configs/)?{name}\.py`', table) for name in names)


def test_public_names_have_docstrings():
  bare = []
  for path in sorted(PACKAGE.rglob('*.py')):
    tree = ast.parse(path.read_text(encoding='utf-8'))
    for node in tree.body:
      if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != '_':
        bare += [f'{path.name}: {node.name}'] * (ast.get_docstring(node) is None)
  assert not bare


# --- commands -----------------------------------------------------------------------


def commands(path) -> list[list[str]]:
  """Returns the words of the lines of a document's blocks that run vit_jax."""
  lines = '\n'.join(documents.blocks(path)).replace('\\\n', ' ').splitlines()
  lines = [re.sub(r'\s+#.*', '', line) for line in lines]
  pattern = r'^(?:\S+=\S+ |srun \S+ )?(?:\S*/bin/)?vit_jax (.*)'
  matches = filter(None, (re.match(pattern, line) for line in lines))
  return [shlex.split(re.sub(r'[][]', ' ', match[1])) for match in matches]


@pytest.mark.parametrize('path', documents.DOCUMENTS, ids=documents.name)
def test_commands_are_those_of_the_program(path):
  for command, *words in commands(path):
    assert command in COMMANDS, f'vit_jax {command}'
    # Each data set or figure has options of its own; NAME stands for any of them.
    kinds = words[0].split('|') if command in ('prepare', 'figures') else ()
    kinds = [kind for kind in kinds if kind != 'NAME']
    known = ''.join(
      generate.help_of(f'{command} {kind}') for kind in kinds
    ) or generate.help_of(command)
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=''):
      flag, _, value = word.partition('=')
      if flag.startswith('--config.'):
        section = flag.removeprefix('--config.').partition('.')[0]
        assert section in schema.SECTIONS or section == 'KEY', word
      elif flag.startswith('--'):
        assert re.search(rf'{flag}\b', known), f'vit_jax {command} {flag}'
      if flag == '--config' and '|' not in word and value not in ('...', 'mine.py'):
        spec = value or following
        config.load(re.sub(r'[A-Z]{3,}', lambda m: WORDS.get(m[0], m[0]), spec))


def test_there_are_commands_to_check():
  lines = [line for path in documents.DOCUMENTS for line in commands(path)]
  assert len(lines) > 60
  assert {line[0] for line in lines} == set(COMMANDS)
