"""Fills the reference with signatures, docstrings and `--help` texts, as mkdocs builds it.

A page of docs/reference/ has lines `::: NAME` (a module, function or class), `::: help
COMMAND` and `::: config NAME` (a file in configs/). mkdocs.yml names this file as a hook, which
replaces each such line; nothing generated is committed.
"""

import ast
import contextlib
import importlib
import inspect
import io
import os
import pathlib
import re
import runpy
import sys
import textwrap
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINE = re.compile(r'^::: (?:(help|config) )?([\w. ]+)$', re.M)
_SECTION = re.compile(r'^(Args|Attributes|Options|Returns|Yields|Raises):\n', re.M)
_INDENTED = re.compile(
  r'(?:(?<=\n\n)|(?<=:\n))(?:  .*\n?)(?:(?:  .*)?\n?)*?(?=\n\S|\Z)'
)


def on_page_markdown(text: str, **_) -> str:
  """Returns a page with its lines `:::` replaced; mkdocs calls it for every page."""
  kinds = {None: python, 'help': help_of, 'config': docstring_of}
  return LINE.sub(lambda match: kinds[match[1]](match[2]).rstrip(), text)


def thing(name: str):
  """Returns the object of a dotted name."""
  parts = name.split('.')
  for i in range(len(parts), 0, -1):
    with contextlib.suppress(ModuleNotFoundError):
      value = importlib.import_module('.'.join(parts[:i]))
      for part in parts[i:]:
        value = getattr(value, part)
      return value
  raise LookupError(name)


def python(name: str) -> str:
  """Returns the heading, signature and docstring of a function or class as Markdown."""
  value = thing(name)
  if inspect.ismodule(value):
    return markdown(value)
  short = name.removesuffix('.__init__').rpartition('.')[2]
  blocks = [f'### `{name.removesuffix(".__init__")}`']
  if not inspect.isclass(value):
    return '\n\n'.join([*blocks, _code(_signature(value, short)), markdown(value)])
  tree = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
  methods = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
  own = {node.name: getattr(value, node.name) for node in methods}
  if '__init__' in own:
    blocks += [_code(_signature(own['__init__'], short))]
  elif fields := [
    node
    for node in tree.body
    if isinstance(node, ast.AnnAssign)
    and 'ClassVar' not in ast.unparse(node.annotation)
  ]:
    lines = textwrap.dedent(inspect.getsource(value)).splitlines()
    last = max(node.end_lineno for node in fields)
    body = textwrap.dedent('\n'.join(lines[fields[0].lineno - 1 : last]))
    blocks += [_code(body)]
  blocks += [markdown(value)]
  for method in ('__init__', '__call__'):
    if method in own and own[method].__doc__:
      call = '' if method == '__init__' else _code(_signature(own[method], method))
      blocks += [call, markdown(own[method])]
  public = [key for key in own if key[0] != '_' and inspect.getdoc(own[key])]
  if public and not tree.bases and '__init__' not in own:
    blocks.append('\n'.join(f'- `{key}`: {_summary(own[key])}' for key in public))
  return '\n\n'.join(filter(None, blocks))


def markdown(value) -> str:
  """Returns a docstring as Markdown: indented blocks as code, its sections as lists."""
  text, *sections = _SECTION.split(inspect.getdoc(value) or '')
  fence = lambda match: _code(textwrap.dedent(match[0]).rstrip(), 'text') + '\n'
  parts = [_INDENTED.sub(fence, text).strip()]
  for title, body in zip(sections[::2], sections[1::2], strict=True):
    lines = textwrap.dedent(body).strip().splitlines()
    if title in ('Args', 'Attributes', 'Options', 'Raises'):
      item = re.compile(r'^([*\w][*\w., ]*?): ')
      lines = [item.sub(r'- `\1`: ', line) for line in lines]
      lines = [line if line[:1] in '- ' else f'  {line}' for line in lines]
    parts.append(f'**{title}**\n\n' + '\n'.join(lines))
  return '\n\n'.join(filter(None, parts))


def help_of(command: str) -> str:
  """Returns the text that `vit_jax COMMAND --help` prints, 88 columns wide."""
  from vit_jax.__main__ import COMMANDS

  name, *rest = command.split()
  out, module = io.StringIO(), COMMANDS[name][0]
  with (
    contextlib.redirect_stdout(out),
    mock.patch.object(sys, 'argv', [name, *rest, '--help']),
    mock.patch.dict(os.environ, COLUMNS='88'),
    contextlib.suppress(SystemExit),
  ):
    for loaded in (module, f'{module}.__main__'):  # runpy warns of imported modules
      sys.modules.pop(loaded, None)
    runpy.run_module(module, run_name='__main__', alter_sys=True)
  return _code(out.getvalue().replace(f'{ROOT}{os.sep}', '').rstrip(), 'text')


def docstring_of(config: str) -> str:
  """Returns the docstring of a file in configs/."""
  text = (ROOT / 'configs' / f'{config}.py').read_text(encoding='utf-8')
  return _code(ast.get_docstring(ast.parse(text)), 'text')


def _signature(function, name: str) -> str:
  """Returns `name(arguments)` as the source has them, one a line if they are long."""
  tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
  texts = _pieces(tree.args)
  texts = texts[texts[:1] == ['self'] :]
  result = f' -> {ast.unparse(tree.returns)}' if tree.returns else ''
  if len(line := f'{name}({", ".join(texts)}){result}') <= 80:
    return line
  return f'{name}(\n' + ''.join(f'  {text},\n' for text in texts) + f'){result}'


def _pieces(args: ast.arguments) -> list[str]:
  texts, positional = [], args.posonlyargs + args.args
  defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
  one = lambda arg, value: (
    ast.unparse(arg) + (f' = {ast.unparse(value)}' if value else '')
  )
  texts += [one(arg, value) for arg, value in zip(positional, defaults, strict=True)]
  if args.vararg or args.kwonlyargs:
    texts.append('*' + (ast.unparse(args.vararg) if args.vararg else ''))
  texts += [one(a, v) for a, v in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
  return texts + ([f'**{ast.unparse(args.kwarg)}'] if args.kwarg else [])


def _summary(value) -> str:
  return ' '.join(inspect.getdoc(value).partition('\n\n')[0].split())


def _code(text: str, language: str = 'py') -> str:
  return f'```{language}\n{text}\n```'
