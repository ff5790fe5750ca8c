"""What a TPU program costs: reading its text here, and libtpu's programs where it is."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from conftest import naming

from vit_jax import cli
from vit_jax.errors import UserError
from vit_jax.tools.bench import __main__ as bench
from vit_jax.tools.bench import big_vision, ours
from vit_jax.tools.inspect import __main__ as inspect
from vit_jax.tools.tpu import cost, generations, hlo, schedules

V3 = generations.GENERATIONS['v3']

# As XLA writes it, with round numbers: a loop of ten, a fusion of each pass, a Pallas call,
# a copy that starts and ends apart, an all-reduce.
PROGRAM = """HloModule jit_step

%fused (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %inside = f32[8,128]{1,0:T(8,128)} add(%p, %p), backend_config={"estimated_cycles":"77"}
}

%body (arg: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %arg = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%arg), index=1
  %f.1 = f32[8,128]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/jvp(ViT)/Transformer/encoderblock/MlpBlock_0/Dense_0/dot_general"}, backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %t = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%x, %f.1)
}

%condition (arg: (s32[], f32[8,128])) -> pred[] {
  %arg.1 = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: bf16[64,197,768]) -> f32[8,128] {
  %a = bf16[64,197,768]{2,1,0:T(8,128)(2,1)} parameter(0)
  %start = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%a)
  %loop = (s32[], f32[8,128]{1,0:T(8,128)}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  %g.1 = f32[8,128]{1,0:T(8,128)} fusion(%a), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/transpose(jvp(ViT))/Transformer/encoderblock_3/LayerNorm_0/div"}, backend_config={"window_config":{"estimated_cycles":"5"}}
  %k.1 = bf16[64,197,768]{2,1,0:T(8,128)(2,1)} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/jvp(ViT)/Transformer/encoderblock_3/MultiHeadDotProductAttention_0/pallas_call"}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"6553600000","transcendentals":"0","bytes_accessed":"1"}}}
  %c.1 = (bf16[64,197,768]{2,1,0:T(8,128)(2,1)}, u32[]{:T(128)}) copy-start(%a)
  %c.2 = bf16[64,197,768]{2,1,0:T(8,128)(2,1)} copy-done(%c.1)
  %r.1 = f32[1024]{0:T(1024)} all-reduce(%x), to_apply=%fused
  ROOT %o.1 = f32[8,128]{1,0:T(8,128)} fusion(%g.1), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/mul"}, backend_config={"window_config":{"estimated_cycles":"7"}}
}
"""


def test_bytes_are_those_of_whole_tiles():
  assert hlo.padded_bytes('bf16[64,197,768]{2,1,0:T(8,128)(2,1)}') == 64 * 200 * 768 * 2
  # The order says which axes vary fastest: here 64 and 197.
  assert hlo.padded_bytes('f32[64,197,12]{0,1,2:T(8,128)}') == 128 * 200 * 12 * 4
  assert hlo.padded_bytes('(f32[3]{0}, pred[], bf16[2,2])') == 12 + 1 + 8


def test_a_program_is_the_sum_of_what_it_runs():
  found = cost.count(PROGRAM, V3)
  products = 6_553_600_000 // 65_536
  assert found['cycles'] == 10 * 100 + 5 + products + 7
  assert found['parts'] == {
    'forward': {'attention': products, 'MLP': 1000},
    'backward': {'norms': 5},
    'optimizer': {'rest': 7},
  }
  (kernel,) = found['uncosted']
  assert (kernel['times'], kernel['cycles']) == (1, products)
  assert 'encoderblock_i' in kernel['op']
  assert found['collectives'] == {'all-reduce': {'times': 1, 'bytes': 2 * 4096}}
  size = 2 * 64 * 200 * 768 * 2 + 4  # from and to, and a counter
  assert found['overlapped']['copy']['bytes'] == size


def test_how_often_a_loop_runs():
  # Where XLA leaves the count out, the loop's condition tells it.
  told = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"10"}}', '')
  assert cost.count(told, V3)['unknown_loops'] == 1
  told = told.replace(
    '  ROOT %less = pred[] constant(true)\n',
    '  %end.1 = s32[]{:T(256)} constant(10)\n'
    '  %i.1 = s32[]{:T(256)} get-tuple-element(%arg.1), index=0\n'
    '  ROOT %less = pred[]{:T(1024)} compare(%i.1, %end.1), direction=LT\n',
  )
  found, expected = cost.count(told, V3), cost.count(PROGRAM, V3)
  assert found == expected
  assert found['unknown_loops'] == 0


def test_bytes_bound_a_kernel_that_moves_more_than_it_computes():
  less = PROGRAM.replace('6553600000', '65536')
  (kernel,) = cost.count(less, V3)['uncosted']
  assert kernel['cycles'] == -(-2 * 64 * 200 * 768 * 2 // V3.bytes_per_cycle)
  most = less.replace('"transcendentals":"0"', '"transcendentals":"204800000"')
  (kernel,) = cost.count(most, V3)['uncosted']
  assert kernel['cycles'] == 200_000


def test_a_kernel_counts_by_its_own_instructions(tmp_path, monkeypatch):
  # As libtpu prints a kernel's metadata: on lines of its own.
  attributes = 'frontend_attributes={kernel_metadata={\n"grid":"64x2x1"\n}}, metadata='
  text = re.sub(r'(tpu_custom_call".*?)metadata=', rf'\1{attributes}', PROGRAM, count=1)
  assert text != PROGRAM
  assert cost.count(text, V3) == cost.count(PROGRAM, V3)
  monkeypatch.setattr(schedules, '_FOLDER', [tmp_path])
  for time, count in (('100', 7), ('101', 5000)):  # the last program's holds
    (tmp_path / f'{time}-k.1-72-schedule-analysis_final_bundles.txt').write_text(
      f'Schedule analysis:\n\ttotal scheduled bundles:    {count}\n'
    )
  (kernel,) = cost.count(text, V3)['uncosted']
  assert kernel['cycles'] == 64 * 2 * 5000


def test_slices():
  assert generations.parse('v3') == ('v3', '2x2x1')
  assert generations.parse('tpu7x:2x2x1') == ('7x', '2x2x1')
  with pytest.raises(UserError, match=naming('v5', 'v5e')):
    generations.parse('v5:2x2')


@pytest.mark.parametrize(
  ('flags', 'facts'),
  [
    (['--tpu', 'v33'], ("'v33'", 'v3')),
    (['--tpu', 'v3', '--vs', 'timm'], ('--tpu', '--vs timm')),
    (['--tpu', 'v3', '--vs', 'big_vision'], ('--big_vision PATH',)),
    (['--big_vision', '.'], ('--vs big_vision',)),
  ],
)
def test_refused(flags, facts, capfd):
  assert cli.run(bench.main, ['vit:mu/16', *flags]) == 2
  assert re.search(naming(*facts), capfd.readouterr().err)


# What `--vs big_vision` asks of a checkout: a module with these fields, in this file.
CHECKOUT = """
from typing import Any
import flax.linen as nn
from big_vision import utils
from big_vision.models import common
class _Model(nn.Module):
  num_classes: int
  patch_size: Any
  width: int
  depth: int
  mlp_dim: int
  num_heads: int
  dropout: float
  pool_type: str
  posemb: str
  rep_size: Any
  scan: bool
  remat_policy: str
  dtype_mm: str
  @nn.compact
  def __call__(self, image, *, train=False):
    x = nn.Dense(self.width, dtype=self.dtype_mm)(image.mean((1, 2)))
    x = nn.Dropout(self.dropout)(x, not train)
    return nn.Dense(self.num_classes)(x), {'pool': self.pool_type}
"""


def test_a_checkout_of_big_vision(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, 'path', [*sys.path])
  for name in ('', '.utils', '.models', '.models.common', '.models.vit'):
    # Noted as missing, so that what the test imports is gone after it.
    monkeypatch.setitem(sys.modules, f'big_vision{name}', None)
    del sys.modules[f'big_vision{name}']
  with pytest.raises(UserError, match=naming('--big_vision', 'models/vit.py')):
    big_vision.Peer(str(tmp_path))
  models = tmp_path / 'big_vision/models'
  models.mkdir(parents=True)
  for path in (models, models.parent):
    (path / '__init__.py').touch()
  (models / 'vit.py').write_text(CHECKOUT)
  peer = big_vision.Peer(str(tmp_path))
  build = lambda name, **fields: ours.Model(
    name, 'bfloat16', (32, 32), {'num_classes': 5, **fields}
  )
  for model, facts in (
    (build('mixer:S/16', depth=1), ('mixer:S/16', 'ViTs')),
    (build('vit:mu/16', stochastic_depth=0.1), ('stochastic_depth',)),
    (build('vit:mu/16', classifier='none'), ("'none'",)),
    (build('vit:mu/16', remat='full'), ('scan',)),
  ):
    with pytest.raises(UserError, match=naming(*facts)):
      peer.check(model)
  model = build('vit:mu/16', dropout=0.1)
  peer.check(model)
  for mode in ('train', 'forward'):
    text = peer.lower(model, mode, 2, jax.devices()[:1]).as_text()
    assert 'bf16' in text
    assert text.count('dot_general') == (5 if mode == 'train' else 2)


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is not None, reason='has libtpu')
def test_without_libtpu_one_line_says_how_to_get_it(capfd):
  for tool, argv in (
    (bench, ['vit:mu/16', '--tpu', 'v3']),
    (inspect, ['--config', 'configs/digits.py', '--tpu', 'v3:2x2x1']),
  ):
    assert cli.run(tool.main, argv) == 2
    assert 'make .venv-tpu' in capfd.readouterr().err


# -- compiled by libtpu: `make tpu` -----------------------------------------------------

# (cycles, bytes of temporaries) of a step, recorded 2026-11-22 with jax 0.10.2 and libtpu
# 0.0.42. Within 3 %: less is noise of the compiler's choices, more is to be looked at; a
# program that got cheaper is recorded anew.
PROGRAMS = {
  'vit': ('vit:S/16', '--set', 'depth=2', '--batch', '32'),
  'vit gap': (
    'vit:B/16',
    '--set',
    'depth=1',
    '--set',
    'classifier=gap',
    '--batch',
    '32',
  ),
  'mixer': ('mixer:S/16', '--set', 'depth=2', '--batch', '32'),
}
RECORDED = {
  ('vit', 'v3'): (4_937_409, 159_511_552),
  ('vit', 'v5e'): (3_655_644, 102_689_280),
  ('vit', 'v6e'): (2_375_977, 98_156_608),
  ('vit gap', 'v3'): (9_044_692, 178_852_864),
  ('vit gap', 'v5e'): (5_646_409, 165_899_264),
  ('vit gap', 'v6e'): (3_024_813, 148_211_200),
  ('mixer', 'v3'): (6_644_396, 167_797_760),
  ('mixer', 'v5e'): (3_990_175, 68_658_176),
  ('mixer', 'v6e'): (2_280_166, 108_099_392),
}


@pytest.fixture(scope='module')
def compiled():
  """Returns {(program, generation): row of `tools.bench --json`}."""
  rows = {}
  for name, argv in PROGRAMS.items():
    command = ['vit_jax.tools.bench', *argv, '--mode', 'train', '--tpu', 'v3,v5e,v6e']
    for row in asked(*command)['rows']:
      rows[name, row['tpu'].partition(':')[0]] = row
  return rows


@pytest.mark.tpu
@pytest.mark.parametrize('key', RECORDED, ids=' '.join)
def test_programs_cost_what_was_recorded(key, compiled):
  row, (cycles, temp_bytes) = compiled[key], RECORDED[key]
  assert row['cycles'] == pytest.approx(cycles, rel=0.03)
  assert row['temp_bytes'] == pytest.approx(temp_bytes, rel=0.03)


def asked(*argv) -> dict:
  """Returns what a tool prints with --json, in a process that compiles for TPUs.

  In one of its own: what conftest asks of JAX would change the programs.
  """
  changed = ('XLA_FLAGS', 'JAX_DEFAULT_MATMUL_PRECISION', 'JAX_PLATFORMS')
  env = {key: value for key, value in os.environ.items() if key not in changed}
  command = [sys.executable, '-m', *argv, '--json']
  done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.tpu
def test_a_scan_costs_what_its_blocks_do():
  argv = ['vit_jax.tools.bench', 'vit:S/16', '--set', 'depth=6', '--batch', '32']
  argv += ['--set', 'classifier=gap', '--mode', 'train', '--tpu', 'v3']
  (loop,), (scan,) = (
    asked(*argv, *more)['rows'] for more in ([], ['--set', 'scan=True'])
  )
  assert scan['unknown_loops'] == 0
  # The same products; stacking what the backward pass needs costs more, up to a half.
  assert 1 <= scan['cycles'] / loop['cycles'] < 1.5


@pytest.mark.tpu
def test_a_recipe_on_a_slice():
  config = str(Path(__file__).parents[1] / 'configs/digits.py')
  argv = ('vit_jax.tools.inspect', '--config', config, '--tpu', 'v5e:2x2')
  flags = ('--config.mesh.fsdp=2', '--config.model.dtype=bfloat16')
  found = asked(*argv, *flags)['tpu']
  assert found['mesh'] == {'data': 2, 'fsdp': 2, 'tensor': 1}
  assert found['devices'] == 4
  assert found['cycles'] > 0
  assert found['collectives']
  # The kernels of attention, each device its own share.
  assert any('backward_attention' in row['op'] for row in found['uncosted'])
  assert found['hours'] == pytest.approx(561 * found['step_s'] / 3600)
  assert found['chip_hours'] == pytest.approx(4 * found['hours'])


# The yardstick: what a product of 4096 x 4096 matrices takes, and x + 1 on 256 MiB.
YARDSTICK = """
import json
from vit_jax.tools.tpu import cost, generations, topology
topology.prepare()
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
found = {}
for name, generation in generations.GENERATIONS.items():
  mesh = Mesh(np.array(topology.devices(name)[:1]), ('d',))
  array = lambda side, dtype: jax.ShapeDtypeStruct(
    (side, side), dtype, sharding=NamedSharding(mesh, PartitionSpec())
  )
  cycles = lambda fn, *args: cost.measure(
    jax.jit(fn).lower(*args).compile(), generation
  )['cycles']
  a, x = array(4096, jnp.bfloat16), array(8192, jnp.float32)
  found[name] = cycles(jnp.matmul, a, a), cycles(lambda x: x + 1, x)
print(json.dumps(found))
"""


@pytest.mark.tpu
def test_rates_are_those_of_the_cost_model():
  env = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
  done = subprocess.run(
    [sys.executable, '-c', YARDSTICK],
    env=env | {'JAX_DEFAULT_MATMUL_PRECISION': 'default'},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  for name, generation in generations.GENERATIONS.items():
    product, add = found[name]
    share = 2 * 4096**3 / product / generation.ops_per_cycle
    assert share < 1
    assert (share >= 0.95) == generation.calibrated, (name, share)
    moved = 2 * 4 * 8192**2 / add
    assert moved == pytest.approx(generation.bytes_per_cycle, rel=0.01), name
