"""GPU programs: parsing their text, and compiling them where JAX's CUDA plugin is installed."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest
from jax.extend.core import Primitive

from tests.support import commands, naming
from vit_jax import cli
from vit_jax.errors import UserError
from vit_jax.tools.bench import __main__ as bench
from vit_jax.tools.bench import gpu, ours
from vit_jax.tools.gpu import attention, devices, topology

# As XLA writes them, without their backend_config: a scan of three blocks with `remat`,
# and one call after it.
PROGRAM = """HloModule jit_step, is_scheduled=true

%forward (arg: (s32[], bf16[64,196,12,64])) -> (s32[], bf16[64,196,12,64]) {
  %arg = (s32[], bf16[64,196,12,64]{3,2,1,0}) parameter(0)
  %q.1 = bf16[64,196,12,64]{3,2,1,0} get-tuple-element(%arg), index=1
  %dot_product_attention_fwd.1 = (bf16[64,12,196,64]{3,1,2,0}, f32[64,12,196]{2,1,0}, u8[0]{0}) custom-call(%q.1, %q.1, %q.1), custom_call_target="__cudnn$fmhaSoftmax", api_version=API_VERSION_STATUS_RETURNING, metadata={op_name="jit(step)/jvp(ViT)/Transformer/while/body/closed_call/encoderblock/MultiHeadDotProductAttention_0/cond/branch_0_fun/dot_product_attention_fwd"}
}

%backward (arg.1: (s32[], bf16[64,196,12,64])) -> (s32[], bf16[64,196,12,64]) {
  %arg.1 = (s32[], bf16[64,196,12,64]{3,2,1,0}) parameter(0)
  %q.2 = bf16[64,196,12,64]{3,2,1,0} get-tuple-element(%arg.1), index=1
  %dot_product_attention_fwd.2 = (bf16[64,12,196,64]{3,1,2,0}, f32[64,12,196]{2,1,0}, u8[0]{0}) custom-call(%q.2, %q.2, %q.2), custom_call_target="__cudnn$fmhaSoftmax", api_version=API_VERSION_STATUS_RETURNING, metadata={op_name="jit(step)/transpose(jvp(ViT))/Transformer/while/body/closed_call/checkpoint/rematted_computation/encoderblock/MultiHeadDotProductAttention_0/cond/branch_0_fun/dot_product_attention_fwd"}
  %dot_product_attention_bwd.1 = (bf16[64,12,196,64]{3,1,2,0}, bf16[64,12,196,64]{3,1,2,0}, bf16[64,12,196,64]{3,1,2,0}, u8[0]{0}) custom-call(%q.2, %q.2, %q.2), custom_call_target="__cudnn$fmhaSoftmaxBackward", api_version=API_VERSION_STATUS_RETURNING, metadata={op_name="jit(step)/transpose(jvp(ViT))/Transformer/while/body/closed_call/checkpoint/encoderblock/MultiHeadDotProductAttention_0/cond/branch_0_fun/dot_product_attention_bwd"}
}

%condition (arg.2: (s32[], bf16[64,196,12,64])) -> pred[] {
  %arg.2 = (s32[], bf16[64,196,12,64]{3,2,1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: bf16[64,196,12,64]) -> bf16[64,196,12,64] {
  %a = bf16[64,196,12,64]{3,2,1,0} parameter(0)
  %start = (s32[], bf16[64,196,12,64]{3,2,1,0}) tuple(%a)
  %while.1 = (s32[], bf16[64,196,12,64]{3,2,1,0}) while(%start), condition=%condition, body=%forward, backend_config={"known_trip_count":{"n":"3"}}
  %while.2 = (s32[], bf16[64,196,12,64]{3,2,1,0}) while(%while.1), condition=%condition, body=%backward, backend_config={"known_trip_count":{"n":"3"}}
  %dot_product_attention_fwd.3 = (bf16[64,12,196,64]{3,1,2,0}, u8[0]{0}) custom-call(%a, %a, %a), custom_call_target="__cudnn$fmhaSoftmax", api_version=API_VERSION_STATUS_RETURNING, metadata={op_name="jit(step)/ViT/MultiHeadDotProductAttention_0/cond/branch_0_fun/dot_product_attention_fwd"}
  %cublas-lt-matmul.7 = (bf16[12544,768]{1,0}, s8[4194304]{0}) custom-call(%a, %a), custom_call_target="__cublas$lt$matmul"
}
"""


def test_calls_of_the_kernel_are_counted_by_pass():
  found = attention.calls(PROGRAM)
  assert found == {'forward': 3 + 1, 'recomputed': 3, 'backward': 3}
  assert attention.calls('ENTRY %main () -> f32[] {\n}') == dict.fromkeys(found, 0)


def layers(mode='forward', dtype='bfloat16', **fields):
  model = ours.Model('vit:mu/16', dtype, (32, 32), {'num_classes': 5, **fields})
  return gpu.about('h100', model, mode)


@pytest.mark.parametrize('scan', [False, True])
def test_layers_that_the_kernel_is_not_offered(scan, monkeypatch):
  fields = {'depth': 3, 'scan': scan, 'classifier': 'map'}
  monkeypatch.setattr('vit_jax.kernels.attention._has_cudnn', lambda: False)
  found = layers(dtype='float32', **fields)
  assert found['attention_layers'] == 4
  assert sorted(found['plain'].values()) == [1, 3]
  assert re.search(naming('float32'), ' '.join(found['plain']))


def test_layers_that_it_is_offered(monkeypatch):
  primitive = Primitive('dot_product_attention_fwd_wrapper')  # as JAX's own is called
  primitive.def_abstract_eval(lambda query, key, value: value)
  monkeypatch.setattr('vit_jax.kernels.attention._has_cudnn', lambda: True)
  monkeypatch.setattr('vit_jax.kernels.attention._cudnn', primitive.bind)
  found = layers(depth=3, classifier='map')
  assert found['attention_layers'] == 4
  (why,) = found['plain']
  assert found['plain'] == {why: 1}
  assert re.search(naming('query'), why)


def test_gpus():
  assert devices.parse('h100') == 'h100'
  with pytest.raises(UserError, match=naming('h10', 'h100', 'b200')):
    devices.parse('h10')
  target = devices.GPUS['h100'].target()
  assert 'core_count: 132\n' in target
  assert 'cuda_compute_capability { major: 9 minor: 0 ' in target
  assert target.count('{') == target.count('}')


@pytest.mark.parametrize(
  ('flags', 'facts'),
  [
    (['--gpu', 'h10'], ("'h10'", 'h100')),
    (['--gpu', 'h100', '--vs', 'timm'], ('--gpu', '--vs timm')),
    (['--gpu', 'h100', '--steps', '3'], ('--gpu', '--steps')),
    (['--gpu', 'h100', '--vs', 'big_vision'], ('--big_vision PATH',)),
    (['--gpu', 'h100', '--tpu', 'v3'], ('--tpu', '--gpu')),
  ],
)
def test_refused(flags, facts, capfd):
  assert cli.run(bench.main, ['vit:mu/16', *flags]) == 2
  assert re.search(naming(*facts), capfd.readouterr().err)


def test_without_the_plugin_one_line_says_how_to_get_it(capfd, monkeypatch):
  def version(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, 'version', version)
  argv = ('vit:mu/16', '--gpu', 'h100')
  facts = (topology.PLUGIN, 'make .venv-gpu')
  commands.assert_refused(bench.main, capfd, argv, facts)


def test_the_table():
  row = {'model': 'vit:B/16', 'mode': 'train', 'dtype': 'bfloat16', 'gpu': 'h100'}
  row |= {'batch': 64, 'resolution': 224, 'params': 86_567_656, 'gflops': 35.1}
  row |= {'hbm': 80 * 2**30, 'attention_layers': 13, 'plain': {'one query': 1}}
  row |= {'temp_bytes': 2 * 2**30, 'argument_bytes': 2**30, 'bytes': 3 * 2**30}
  row |= {
    'cudnn': {'forward': 12, 'recomputed': 6, 'backward': 12},
    'set': ['scan=True'],
  }
  other = {'temp_bytes': 2**32, 'argument_bytes': 2**30, 'bytes': 5 * 2**30}
  other['cudnn'] = dict.fromkeys(row['cudnn'], 0)
  row |= {'vs': other, 'ratio': {'temp_bytes': 0.5, 'bytes': 0.6}}
  text = gpu.table({'rows': [row], 'versions': {'jax': '0.10.2'}})
  assert 'vit:B/16, scan=True at 224x224 px' in text
  assert re.search(r'1\.00 GiB +2\.00 GiB +3\.00 GiB +80\.00 GiB', text)
  assert 'forward 12 of 13, backward 12 of 13, recomputed 6\n' in text
  assert re.search(r'big_vision .*4\.00 GiB +5\.00 GiB.*forward 0 of 13', text)
  assert re.search(r'ratio +0\.500 +0\.600', text)
  assert '1 of 13: one query' in text
  text = gpu.table({'rows': [row | {'hbm': 2**30}], 'versions': {}})
  assert 'recomputed 6; does not fit' in text
  assert 'cycles' in text


# -- compiled by CUDA's plugin: `make gpu` ----------------------------------------------


def asked(*argv) -> list[dict]:
  """Returns the rows of `tools.bench --json`, in a process that compiles for GPUs.

  In one of its own: what conftest asks of JAX would change the programs.
  """
  changed = ('XLA_FLAGS', 'JAX_DEFAULT_MATMUL_PRECISION', 'JAX_PLATFORMS')
  env = {key: value for key, value in os.environ.items() if key not in changed}
  command = [sys.executable, '-m', 'vit_jax.tools.bench', *argv, '--json']
  done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])['rows']


@pytest.mark.gpu
def test_attention_is_the_fused_kernel():
  argv = ('vit:S/16', '--set', 'depth=2', '--set', 'classifier=map', '--batch', '32')
  train, forward = asked(*argv, '--gpu', 'h100')
  assert train['attention_layers'] == 3
  assert list(train['plain'].values()) == [1]  # the head's one query
  assert train['cudnn'] == {'forward': 2, 'recomputed': 0, 'backward': 2}
  assert forward['cudnn'] == {'forward': 2, 'recomputed': 0, 'backward': 0}
  # Parameters and the second moment in float32, the first in bfloat16; images of bytes.
  state, batch = (4 + 4 + 2) * train['params'], 32 * (224 * 224 * 3 + 2 * 4)
  assert 0 <= train['argument_bytes'] - state - batch < 2**16  # counters, alignment
  assert train['bytes'] >= train['argument_bytes'] + train['temp_bytes']
  assert train['bytes'] < train['hbm'] == devices.GPUS['h100'].memory


@pytest.mark.gpu
@pytest.mark.parametrize('scan', [False, True])
def test_odd_numbers_of_tokens_are_trained_on_with_it(scan):
  # 197: JAX refuses the gradient, unless `kernels.attention` makes the number even.
  argv = ('vit:S/16', '--set', 'depth=3', '--set', f'scan={scan}', '--batch', '32')
  argv += ('--set', 'remat=full') if scan else ()
  (row,) = asked(*argv, '--mode', 'train', '--gpu', 'h100')
  alone = 0 if scan else 1  # the last block, of which the class token's query is wanted
  assert sum(row['plain'].values()) == alone
  fused = 3 - alone
  times = {'forward': fused, 'recomputed': 3 if scan else 0, 'backward': fused}
  assert row['cudnn'] == times
