"""HTML from data. Whatever comes from outside is escaped here."""

import html
import json
from collections.abc import Iterable


def text(value) -> str:
  """Returns a value as text of HTML, also within an attribute's quotes."""
  return html.escape(str(value))


def table(head: Iterable, rows: Iterable[Iterable], caption: str = '') -> str:
  """Returns a table that scrolls sideways if it is too wide; the first column heads rows.

  Args:
    head: titles of the columns, escaped here.
    rows: their cells, escaped here.
    caption: what a screen reader calls it.
  """
  named = f'<caption>{text(caption)}</caption>' if caption else ''
  columns = ''.join(f'<th scope="col">{text(cell)}</th>' for cell in head)
  body = ''.join(
    f'<tr><th scope="row">{text(first)}</th>'
    + ''.join(f'<td>{text(cell)}</td>' for cell in rest)
    + '</tr>'
    for first, *rest in rows
  )
  label = text(caption or 'table')
  # Focusable, as it may have to be scrolled by keyboard.
  return (
    f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>{named}'
    f'<thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>'
  )


def pairs(rows: Iterable[tuple]) -> str:
  """Returns a list of terms and their values; values of None or '' are left out."""
  items = ''.join(
    f'<div><dt>{text(key)}</dt><dd>{text(value)}</dd></div>'
    for key, value in rows
    if value not in (None, '')
  )
  return f'<dl>{items}</dl>'


def details(summary: str, body: str, opened: bool = False) -> str:
  """Returns a part of the page that a click opens.

  Args:
    summary: text, escaped here.
    body: HTML.
  """
  return (
    f'<details{" open" * opened}><summary>{text(summary)}</summary>{body}</details>'
  )


def code(value: str) -> str:
  """Returns preformatted text that scrolls sideways."""
  return f'<pre tabindex="0"><code>{text(value)}</code></pre>'


def command(value: str) -> str:
  """Returns a command line with a button that copies it."""
  return (
    f'<div class="command">{code(value)}'
    '<button type="button" class="copy">Copy</button></div>'
  )


def data(value) -> str:
  """Returns JSON that is safe inside a script element."""
  found = json.dumps(value, separators=(',', ':'), allow_nan=False)
  for character in '<>&\u2028\u2029':
    found = found.replace(character, f'\\u{ord(character):04x}')
  return found
