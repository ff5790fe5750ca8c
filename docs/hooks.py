"""MkDocs hooks: `--help` texts and config docstrings are taken from the code.

A line `<!-- help: COMMAND -->` becomes what `vit_jax COMMAND --help` prints, a line
`<!-- config: NAME -->` the docstring of configs/NAME.py.
"""

import ast
import concurrent.futures
import functools
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


@functools.cache
def help_of(command: str) -> str:
  """Returns what `vit_jax COMMAND --help` prints, 88 columns wide.

  Raises:
    RuntimeError: if the command fails.
  """
  done = subprocess.run(
    [sys.executable, '-m', 'vit_jax', *command.split(), '--help'],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env={**os.environ, 'COLUMNS': '88'},
    check=False,
  )
  if done.returncode:
    raise RuntimeError(f'vit_jax {command} --help: {done.stderr}')
  return done.stdout.replace(f'{ROOT}{os.sep}', '')


def docstring_of(config: str) -> str:
  """Returns the docstring of a file in configs/."""
  text = (ROOT / 'configs' / f'{config}.py').read_text(encoding='utf-8')
  return ast.get_docstring(ast.parse(text))


def on_page_markdown(markdown: str, **_) -> str:
  """Called by MkDocs with the text of every page."""
  kinds = {'help': help_of, 'config': docstring_of}
  pattern = r'^<!-- (help|config): ([\w ]+) -->$'
  commands = [
    name for kind, name in re.findall(pattern, markdown, re.M) if kind == 'help'
  ]
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    list(pool.map(help_of, commands))
  fenced = lambda match: f'```text\n{kinds[match[1]](match[2]).rstrip()}\n```'
  return re.sub(pattern, fenced, markdown, flags=re.M)
