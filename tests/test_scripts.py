"""scripts/, run with a fake gcloud that records its arguments and runs commands here."""

import os
import re
import shlex
import subprocess

import pytest

from tests.support import runs

# Runs what `ssh --command` says in a folder that stands for a worker's home, which is
# there from `create` to `delete`.
GCLOUD = """#!/bin/sh
printf '%s\\n' "gcloud $4 $5" >> "$LOG"
echo "$*" | tr '\\n' ' ' >> "$LOG.gcloud"; echo >> "$LOG.gcloud"
case "$4" in
  create) mkdir "$HOME" ;;
  delete) mv "$HOME" "$HOME.deleted" ;;
  scp) cp "$5" "$HOME/vit_jax.tar.gz" ;;
  ssh) for word; do
    case "$word" in --command=*) cd "$HOME"; sh -c "${word#--command=}" ;; esac
  done ;;
esac
"""
# Makes .venv, of programs that write down their arguments. Training stops once with exit
# code 75, and then ends as it is told. TPU images have no Python but TOO_OLD and newer.
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-c "*) exit "$TOO_OLD" ;;
  "-m pip"|"-m uv") [ "$TOO_OLD" = 1 ] || exit 9 ;;
  "-m venv") [ "$TOO_OLD" = 0 ] || exit 9 ;;
esac
echo "python3 $*" | sed 's/ -c .*//' >> "$LOG"
for last; do :; done
case "$1 $2" in "-m venv"|"-m uv")
  mkdir -p "$last/bin"
  for program in pip vit_jax; do cp "$TOOLS/$program.there" "$last/bin/$program"; done ;;
esac
"""
PIP = """#!/bin/sh
echo "pip $*" >> "$LOG"
"""
VIT_JAX = """#!/bin/sh
echo "vit_jax $*" >> "$LOG"
printf '%s\\n' "$@" > "$LOG.$1"
if [ "$1" = doctor ]; then exit "$ILL"; fi
[ -e "$HOME/stopped" ] && exit "$END"
touch "$HOME/stopped"; exit 75
"""
MISSING = '#!/bin/sh\nexit 127\n'


@pytest.fixture
def machine(tmp_path):
  """Returns a function that runs a command line where gcloud is the one above."""
  tools = tmp_path / 'tools'
  tools.mkdir()
  programs = {'gcloud': GCLOUD, 'python3': PYTHON}
  programs |= {'pip.there': PIP, 'vit_jax.there': VIT_JAX}
  programs |= {f'python3.{minor}': MISSING for minor in (11, 12, 13)}
  for name, text in programs.items():
    (tools / name).write_text(text)
    (tools / name).chmod(0o755)

  def run(*command, end=0, ill=0, too_old=0):
    env = os.environ | dict(
      PATH=f'{tools}:{os.environ["PATH"]}',
      HOME=str(tmp_path / 'home'),
      LOG=str(tmp_path / 'log'),
      TOOLS=str(tools),
      END=str(end),
      ILL=str(ill),
      TOO_OLD=str(too_old),
      GIT_CONFIG_COUNT='1',  # the checkout may be another user's
      GIT_CONFIG_KEY_0='safe.directory',
      GIT_CONFIG_VALUE_0='*',
    )
    return subprocess.run(
      command, cwd=runs.ROOT, env=env, capture_output=True, text=True
    )

  return run


def start(machine, tmp_path, *arguments, **options):
  (tmp_path / 'home').mkdir()
  return machine(str(runs.ROOT / 'scripts' / 'tpu_vm.sh'), *arguments, **options)


def log(tmp_path, what='log') -> list[str]:
  return (tmp_path / what).read_text().splitlines()


def test_the_commands_of_the_guide(machine, tmp_path):
  guide = (runs.ROOT / 'docs/guides/tpu.md').read_text(encoding='utf-8')
  section = guide.partition('\n## A TPU VM\n')[2]
  commands = re.search(r'^```\n(.*?)^```', section, re.M | re.S)[1]
  words = {'NAME': 'first', 'ZONE': 'us-east5-b', 'BUCKET': 'ours'}
  for word, value in words.items():
    commands = re.sub(rf'\b{word}\b', value, commands)
  done = machine('sh', '-e', '-c', commands)
  assert done.returncode == 0, done.stderr
  train = 'vit_jax train --distributed --config=vit_b16 --workdir=gs://ours/runs/b16'
  archive = log(tmp_path)[1].split()[-1]
  assert log(tmp_path) == [
    'gcloud create first',
    f'gcloud scp {archive}',
    'gcloud ssh first',
    'python3 -m venv .venv',
    'pip install --quiet -e .[tf,tpu]',
    'vit_jax doctor --expect tpu',
    'gcloud ssh first',
    *(train, train),  # it was stopped once
    'gcloud delete first',
  ]
  for call in log(tmp_path, 'log.gcloud'):
    assert shlex.split(call)[:3] == ['compute', 'tpus', 'tpu-vm']
    assert '--zone=us-east5-b' in call
  assert (tmp_path / 'home.deleted/vit_jax/configs/vit_b16.py').exists()
  assert not os.path.exists(archive)


def test_arguments_reach_all_workers_as_they_were(machine, tmp_path):
  arguments = ['--config=digits:seed=1', "--config.data.pp=resize(16, 'area')"]
  done = start(machine, tmp_path, 'pod', 'zone', *arguments)
  assert done.returncode == 0, done.stderr
  assert log(tmp_path, 'log.train') == ['train', '--distributed', *arguments]
  for call in log(tmp_path, 'log.gcloud'):
    assert '--zone=zone --worker=all' in call


def test_a_python_that_is_too_old_is_left_alone(machine, tmp_path):
  done = start(machine, tmp_path, 'pod', 'zone', '--config=x', too_old=1)
  assert done.returncode == 0, done.stderr
  assert [line for line in log(tmp_path) if line.startswith('python3')] == [
    'python3 -m pip install --quiet --user uv',
    'python3 -m uv venv --quiet --seed --python 3.12 .venv',
  ]


DOCTOR = 'vit_jax doctor --expect tpu'
TRAIN = 'vit_jax train --distributed --config=x'


@pytest.mark.parametrize(
  ('fakes', 'code', 'last'),
  [
    (dict(ill=1), 1, [DOCTOR]),
    # A failure is not repeated; a run that never gets going is given up.
    (dict(end=77), 77, [DOCTOR, 'gcloud ssh pod', TRAIN, TRAIN]),
    (dict(end=75), 75, [TRAIN] * 3),
  ],
)
def test_a_failure_ends_the_script(machine, tmp_path, fakes, code, last):
  done = start(machine, tmp_path, 'pod', 'zone', '--config=x', **fakes)
  assert done.returncode == code
  assert log(tmp_path)[-len(last) :] == last


def test_too_few_arguments(machine, tmp_path):
  done = start(machine, tmp_path, 'pod')
  assert done.returncode == 2
  assert 'usage' in done.stderr
