"""A griffe extension that shows what a docstring indents as a block of code.

Docstrings here indent examples and tables by two spaces; Markdown expects four.
"""

import re

import griffe

_SECTION = re.compile(r'^(Args|Attributes|Returns|Yields|Raises):', re.M)
_BLOCK = re.compile(r'(?<=\n\n)(?:  .*\n?)(?:(?:  .*)?\n?)*?(?=\n\S|\Z)')


def fenced(text: str) -> str:
  """Returns a docstring with fences around the indented blocks before its sections."""
  section = _SECTION.search(text)
  end = section.start() if section else len(text)
  fence = lambda match: f'```text\n{match[0].rstrip()}\n```\n'
  return _BLOCK.sub(fence, text[:end]) + text[end:]


class Indented(griffe.Extension):
  """Applies `fenced` to every docstring."""

  def on_object(self, *, obj: griffe.Object, **_) -> None:
    """Called by griffe for everything that it has read."""
    if obj.docstring:
      obj.docstring.value = fenced(obj.docstring.value)
