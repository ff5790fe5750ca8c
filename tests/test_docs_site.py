"""The site that `make docs` built: no page asks for anything from elsewhere."""

import re

import pytest

from tests.support import documents

pytestmark = pytest.mark.docs
SITE = documents.ROOT / 'build' / 'docs'
# What a browser loads by itself; <a href> is for the reader.
LOADED = re.compile(
  r'<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\ssrc="?([^"\s>]+)'
  r'|<link\b(?![^>]*rel="?(?:canonical|next|prev))[^>]*?\shref="?([^"\s>]+)'
)
OUTSIDE = re.compile(r'(?:https?:)?//')


def test_pages_load_nothing_from_elsewhere():
  pages = sorted(SITE.rglob('*.html'))
  assert len(pages) > len(documents.PAGES)  # and a 404
  for page in pages:
    loaded = [a or b for a, b in LOADED.findall(page.read_text(encoding='utf-8'))]
    assert loaded
    assert not [url for url in loaded if OUTSIDE.match(url)], page


def test_style_sheets_load_nothing_from_elsewhere():
  sheets = sorted(SITE.rglob('*.css'))
  assert sheets
  for sheet in sheets:
    text = sheet.read_text(encoding='utf-8')
    urls = re.findall(r'(?:url\(|@import )\s*["\']?([^"\')]+)', text)
    assert not [url for url in urls if OUTSIDE.match(url)], sheet


def test_scripts_are_given_no_addresses():
  # The theme would load diagrams and a repository's stars from elsewhere.
  for page in SITE.rglob('*.html'):
    text = page.read_text(encoding='utf-8')
    assert 'class="mermaid' not in text
    assert 'data-md-component="source"' not in text


def test_every_page_was_built():
  for page in documents.PAGES:
    path = SITE / page.relative_to(documents.DOCS).with_suffix('.html')
    text = path.read_text(encoding='utf-8')
    assert str(documents.ROOT) not in text  # a path of the machine that built it
