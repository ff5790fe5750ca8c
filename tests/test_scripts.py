"""scripts/, run with a gcloud that writes down what it was asked, and does it here."""

import os
import shlex
import subprocess

import runs

# Runs what `ssh --command` says in a folder that stands for a worker's home.
GCLOUD = """#!/bin/sh
printf '%s\\n' "$*" >> "$LOG"
case "$4" in
  scp) cp "$5" "$HOME/vit_jax.tar.gz" ;;
  ssh) for word; do
    case "$word" in --command=*) cd "$HOME"; sh -c "${word#--command=}" ;; esac
  done ;;
esac
"""
# Stops once with exit code 75, and then ends as it is told.
PYTHON = """#!/bin/sh
printf '%s\\n' "$@" > "$HOME/arguments"
[ -e "$HOME/stopped" ] && exit "$END"
touch "$HOME/stopped"; exit 75
"""


def start(tmp_path, *arguments, end=0):
  home, tools = tmp_path / 'home', tmp_path / 'tools'
  programs = home / 'vit_jax' / '.venv' / 'bin'
  programs.mkdir(parents=True)
  tools.mkdir()
  for path, text in (
    (tools / 'gcloud', GCLOUD),
    (programs / 'python', PYTHON),
    (programs / 'pip', '#!/bin/sh\n'),
  ):
    path.write_text(text)
    path.chmod(0o755)
  env = os.environ | dict(
    PATH=f'{tools}:{os.environ["PATH"]}',
    HOME=str(home),
    LOG=str(tmp_path / 'log'),
    END=str(end),
    GIT_CONFIG_COUNT='1',  # the checkout may be another user's
    GIT_CONFIG_KEY_0='safe.directory',
    GIT_CONFIG_VALUE_0='*',
  )
  command = [str(runs.ROOT / 'scripts' / 'tpu_vm.sh'), *arguments]
  return subprocess.run(command, cwd=runs.ROOT, env=env, capture_output=True, text=True)


def test_all_workers_get_the_checkout_and_the_command(tmp_path):
  wanted = ['--config=configs/digits.py:seed=1', "--config.data.pp=resize(16, 'area')"]
  done = start(tmp_path, 'pod', 'us-east1-d', *wanted)
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'home/vit_jax/configs/digits.py').exists()
  assert (tmp_path / 'home/stopped').exists()  # and was started again
  said = (tmp_path / 'home/arguments').read_text().splitlines()
  assert said == ['-m', 'vit_jax.main', '--distributed', *wanted]
  calls = [
    line for line in (tmp_path / 'log').read_text().splitlines() if 'tpu-vm' in line
  ]
  assert len(calls) == 3
  for call in calls:
    assert shlex.split(call)[:3] == ['compute', 'tpus', 'tpu-vm']
    assert '--zone=us-east1-d --worker=all' in call
    assert 'pod' in call


def test_a_failure_is_not_repeated(tmp_path):
  assert start(tmp_path, 'pod', 'zone', '--config=x', end=77).returncode == 77


def test_too_few_arguments(tmp_path):
  done = start(tmp_path, 'pod')
  assert done.returncode == 2
  assert 'usage' in done.stderr
