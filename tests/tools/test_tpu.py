"""The cost of a TPU program, read from its text, and what the tools for it refuse."""

import importlib.util
import re
import sys
from types import SimpleNamespace

import jax
import pytest

from tests.support import naming
from vit_jax import cli
from vit_jax.errors import UserError
from vit_jax.tools.bench import __main__ as bench
from vit_jax.tools.bench import big_vision, ours
from vit_jax.tools.inspect import __main__ as inspect
from vit_jax.tools.inspect import mesh_memory, recipe
from vit_jax.tools.inspect import tpu as inspect_tpu
from vit_jax.tools.tpu import cost, generations, hlo, schedules, topology

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
  %c.1 = (bf16[64,197,768]{2,1,0:T(8,128)(2,1)S(1)}, bf16[64,197,768]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%a)
  %c.2 = bf16[64,197,768]{2,1,0:T(8,128)(2,1)} copy-done(%c.1)
  %r.1 = f32[1024]{0:T(1024)} all-reduce(%x), to_apply=%fused
  ROOT %o.1 = f32[8,128]{1,0:T(8,128)} fusion(%g.1), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/mul"}, backend_config={"window_config":{"estimated_cycles":"7"}}
}
"""


def count(text: str, steps=()) -> dict:
  return cost.count(text, V3, dict(steps))


def test_bytes_are_those_of_whole_tiles():
  assert hlo.padded_bytes('bf16[64,197,768]{2,1,0:T(8,128)(2,1)}') == 64 * 200 * 768 * 2
  # The order says which axes vary fastest: here 64 and 197.
  assert hlo.padded_bytes('f32[64,197,12]{0,1,2:T(8,128)}') == 128 * 200 * 12 * 4
  assert hlo.padded_bytes('(f32[3]{0}, pred[], bf16[2,2])') == 12 + 1 + 8


def test_an_asynchronous_copy_moves_what_it_copies_between_memories():
  whole, part = 'f32[16,48,384]{2,1,0:T(8,128)}', 'f32[4,48,384]{2,1,0:T(8,128)'
  size = 4 * 48 * 384 * 4
  assert hlo.copied_bytes(f'(({whole}), {part}S(1)}}, s32[]{{:S(2)}})') == size
  assert hlo.copied_bytes(f'({part}}}, {part}}}, u32[]{{:S(2)}})') == 2 * size


def test_an_array_that_a_kernel_reads_by_columns_is_read_once():
  once = count(PROGRAM)['uncosted'][0]['bytes']
  by_columns = PROGRAM.replace('custom-call(%a)', 'custom-call(%a, %a, %a)')
  assert count(by_columns)['uncosted'][0]['bytes'] == once == 2 * 64 * 200 * 768 * 2


def test_a_program_is_the_sum_of_what_it_runs():
  found = count(PROGRAM)
  products = 6_553_600_000 // 65_536
  assert found['cycles'] == 10 * 100 + 5 + products + 7
  assert found['parts'] == {
    'forward': {'attention': products, 'MLP': 1000},
    'backward': {'norms': 5},
    'optimizer': {'rest': 7},
  }
  name = 'Transformer/encoderblock_3/MultiHeadDotProductAttention_0'
  swin = PROGRAM.replace(name, 'stage1_block_0/attention')
  assert swin != PROGRAM
  assert count(swin)['parts'] == found['parts']
  (kernel,) = found['uncosted']
  assert (kernel['times'], kernel['cycles']) == (1, products)
  assert 'encoderblock_i' in kernel['op']
  assert found['collectives'] == {'all-reduce': {'times': 1, 'bytes': 2 * 4096}}
  size = 64 * 200 * 768 * 2  # read; what is written lies on chip
  assert found['overlapped']['copy']['bytes'] == size


def test_how_often_a_loop_runs():
  # Where XLA leaves the count out, the loop's condition tells it.
  told = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"10"}}', '')
  assert count(told)['unknown_loops'] == 1
  told = told.replace(
    '  ROOT %less = pred[] constant(true)\n',
    '  %end.1 = s32[]{:T(256)} constant(10)\n'
    '  %i.1 = s32[]{:T(256)} get-tuple-element(%arg.1), index=0\n'
    '  ROOT %less = pred[]{:T(1024)} compare(%i.1, %end.1), direction=LT\n',
  )
  found, expected = count(told), count(PROGRAM)
  assert found == expected
  assert found['unknown_loops'] == 0
  assert count(told.replace('s32[]{:T(256)}', 'u32[]{:T(256)}')) == expected


def test_bytes_bound_a_kernel_that_moves_more_than_it_computes():
  less = PROGRAM.replace('6553600000', '65536')
  (kernel,) = count(less)['uncosted']
  assert kernel['cycles'] == -(-2 * 64 * 200 * 768 * 2 // V3.bytes_per_cycle)
  most = less.replace('"transcendentals":"0"', '"transcendentals":"204800000"')
  (kernel,) = count(most)['uncosted']
  assert kernel['cycles'] == 200_000


def test_a_kernel_counts_by_its_own_instructions(tmp_path, monkeypatch):
  # As libtpu prints a kernel's metadata: on lines of its own.
  attributes = 'frontend_attributes={kernel_metadata={\n"grid":"64x2x1"\n}}, metadata='
  text = re.sub(r'(tpu_custom_call".*?)metadata=', rf'\1{attributes}', PROGRAM, count=1)
  assert text != PROGRAM
  assert count(text) == count(PROGRAM)
  monkeypatch.setattr(schedules, '_FOLDER', [tmp_path])
  for time, bundles in (('100', 7), ('101', 5000)):  # the last program's holds
    lines = [f' {i:#6x}   : {{ %1 = vnop }}\n' for i in range(bundles)]
    lines[3] = '   0x3 LB: > { %2 = vadd.xlane.f32.xlu0 %v9  ;;  %3 = vdelay 83 }\n'
    (tmp_path / f'{time}-k.1-73-final_bundles.txt').write_text(''.join(lines))
    (tmp_path / f'{time}-k.1-72-schedule-analysis_final_bundles.txt').write_text('')
    (tmp_path / f'{time}-fusion.1-73-final_bundles.txt').write_text(''.join(lines))
  steps = schedules.take({'k.1'})
  assert steps == {'k.1': 5000 + 83}  # what it waits for is not hidden
  assert not list(tmp_path.iterdir())  # the next program's are its own
  (kernel,) = count(text, steps)['uncosted']
  assert kernel['cycles'] == 64 * 2 * 5083
  # libtpu makes kernels once that are alike: the number of either counts for both.
  another = re.sub(r'\n(  %)k\.1(.*\n.*\n.*)', r'\n\1k.1\2\n\1k.9\2', text, count=1)
  (kernel,) = count(another, steps)['uncosted']
  assert (kernel['times'], kernel['cycles']) == (2, 2 * 64 * 2 * 5083)


def test_slices():
  assert generations.parse('v3') == ('v3', '2x2x1')
  assert generations.parse('tpu7x:2x2x1') == ('7x', '2x2x1')
  with pytest.raises(UserError, match=naming('v5', 'v5e')):
    generations.parse('v5:2x2')
  for name in ('v3-8', 'v5litepod-8', 'v5p-128'):  # as gcloud has them
    with pytest.raises(UserError, match=naming(name, 'v3:2x2', 'v5e:2x4')):
      generations.parse(name)
  # libtpu takes the second, and the first ends the process.
  for name in ('v5e:8x16x2', 'v6e:2x2x2', 'v5e:32x32', 'v3:4x', 'v5e:2x2,v3:2x2'):
    with pytest.raises(UserError, match=naming(name, 'axes')):
      generations.parse(name)


def test_a_program_that_is_compiled_for_more_memory_than_there_is(monkeypatch):
  monkeypatch.setattr(topology, 'devices', lambda text: jax.devices())
  lowered = SimpleNamespace(compile=lambda: None)
  step = SimpleNamespace(lower=lambda: lowered)
  monkeypatch.setattr(mesh_memory, 'TrainStep', lambda *_: step)
  monkeypatch.setattr(cost, 'measure', lambda *_: {'bytes': 17 * 2**30})
  config = recipe.load('shapes', [])
  record = recipe.describe(config, None)
  request = recipe.request(config, record, {})
  with pytest.raises(UserError, match=naming('v3:2x2', 'does not fit', 16, '17.00')):
    inspect_tpu.inspect(request, record, config['mesh'], 'v3:2x2')
  # A million cycles of cores that reach 61.5 TFLOP/s by two units of 128 x 128; a chip has
  # two cores, and here are eight.
  fits = {'bytes': 2**30, 'temp_bytes': 2**29, 'cycles': 10**6}
  fits |= {'collectives': {}, 'unknown_loops': 0}
  monkeypatch.setattr(cost, 'measure', lambda *_: fits)
  found = inspect_tpu.inspect(request, record, config['mesh'], 'v3:2x2')
  hours = record['steps'] * 1e6 / (61.5e12 / (2 * 2 * 128**2)) / 3600
  assert found['hours'] == pytest.approx(hours)
  text = inspect_tpu.render(found)
  assert re.search(
    naming(f'{hours:.2g} hours', f'{hours * 8 / 2:.2g} chip-hours'), text
  )


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
