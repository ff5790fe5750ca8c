"""The README and the pages of docs/: blocks, prose, anchors."""

import importlib.util
import re
import unicodedata
from pathlib import Path

from tests.support import ROOT

DOCS = ROOT / 'docs'
PAGES = sorted(DOCS.rglob('*.md'))
_spec = importlib.util.spec_from_file_location('generate', DOCS / 'generate.py')
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)
DOCUMENTS = [ROOT / 'README.md', *PAGES]


def name(path: Path) -> str:
  """Returns a document's path in the checkout."""
  return path.relative_to(ROOT).as_posix()


def text(path: str | Path) -> str:
  """Returns the text of a document."""
  return (ROOT / path).read_text(encoding='utf-8')


def blocks(path: Path, language: str = '') -> list[str]:
  """Returns the fenced blocks of a document that are marked as of a language."""
  return re.findall(rf'^ *```{language}\n(.*?)^ *```$', text(path), re.M | re.S)


def without_code(path: Path) -> str:
  """Returns a document without its fenced blocks and code spans."""
  prose = re.sub(r'^ *```.*?^ *```$', '', text(path), flags=re.M | re.S)
  return re.sub(r'`[^`\n]*`', '', prose)


def anchors(path: Path) -> set[str]:
  """Returns the ids of the headings, as Python-Markdown's extension toc makes them."""
  prose = re.sub(r'^ *```.*?^ *```$', '', text(path), flags=re.M | re.S)
  titles = re.findall(r'^#+ (.*)$', prose, re.M)
  return {_slug(re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', title)) for title in titles}


def _slug(title: str) -> str:
  plain = unicodedata.normalize('NFKD', title).encode('ascii', 'ignore').decode()
  return re.sub(r'[-\s]+', '-', re.sub(r'[^\w\s-]', '', plain).strip().lower())
