"""The scripts in benchmarks/, as far as they need neither PyTorch nor libtpu."""

import importlib
from pathlib import Path

import jax
import pytest

from vit_jax.tools import bench
from vit_jax.tools.inspect import tpu

FOLDER = Path(__file__).parents[1] / 'benchmarks'


@pytest.fixture(autouse=True)
def path(monkeypatch):
  monkeypatch.syspath_prepend(str(FOLDER))


def test_ratios_of_turns():
  turns = importlib.import_module('turns')
  order = []

  def side(name, seconds):
    def turn():
      order.append(name)
      return {'wall': seconds, 'cpu': 2 * seconds}

    return turn

  timing = turns.compare(side('ours', 1.0), side('theirs', 1.5), 3)
  pair = ['ours', 'theirs']
  assert order == [*pair, *pair, *pair[::-1], *pair]
  assert (timing['ours'], timing['theirs']) == (1.0, 1.5)
  assert {timing[key] for key in ('ratio', 'low', 'high', 'cpu_ratio')} == {1.5}


# As libtpu writes it: a loop of 34 with one of 4 inside, a delay, an exit.
SCHEDULE = """
// HLO: %k.1
LH: loop header
   0x0   :  { %1 = vnop }
   0x1 LB: > { %2 = sadd.s32 1, %s1 }
   0x2   : > { %3 = vadd.xlane.f32.xlu0 %v9  ;;  %4 = vdelay 10 }
   0x3 LB: > > { %5 = vnop }
   0x4   : > > { %p1 = scmp.ge.s32.totalorder %s2, 4 /* loop exit test */ }
   0x5   : > > { %7 = sbr.rel (!%p1) target = $region1 }
   0x6   : > { %p2 = scmp.ge.s32.totalorder %s3, 34 /* loop exit test */ }
   0x7   :  { %9 = sbr.rel (!%p2) target = $region2 }
"""


# From a copy's schedule by libtpu 0.0.50.1: empty bundles have no mark of their loop.
# The inner loop has as many trips as a register says.
EMPTY_BUNDLES = """
   0x1   :  { %s1999_s8 = smov 0 /* copy for cssa */ } /* End region 615 */
   0x2 LB: > { %s26_s9 = sadd.s32 1, %s1947_s7 }
  0x12   : > { %95 = sbr.rel (%p92_p4) target = $region42 }
  0x13   :  {}
  0x14   :  {}
  0x15   :  {}
  0x16   :  {} /* End region 40 */
 0x152   : > { %s2220_s5 = smov (!%p1789_p7), 0 /* copy for cssa */ }
 0x153   :  {}
 0x154   :  {} /* End region 590 :: End region 593 */
 0x155 LB: >> { %s1361_s6 = sadd.s32 1, %s1963_s4 }
 0x176   : >> { %1360 = vst [vmem:[%s1955_s2 + $0x3e] sm:$0x3] /*vst_source=*/%v1359_v25 }
 0x185   :  {}
 0x186   :  {} /* End region 620 :: End region 41 :: End region 45 */
 0x188   : > { %p4_p13 = scmp.ge.s32.totalorder %s7_s8, 7 /* loop exit test */ }
 0x189   :  { %6 = sbr.rel (!%p4_p13) target = $region620 }
 0x18a   :  {}
"""


def test_cycles_of_a_schedule():
  rulers = importlib.import_module('rulers')
  assert rulers.cycles_of(SCHEDULE) == 2 + 34 * (3 + 10 + 4 * 3)
  assert rulers.cycles_of(EMPTY_BUNDLES) == 3 + 7 * (1 + 1 + 4 + 1 + 2 + 2 + 2 + 1)


# A loop of ten with a fusion in it, two fusions that are alike, a Pallas kernel, a copy
# that runs beside them, and an all-reduce; round numbers.
PROGRAM = """HloModule jit_step

%fused (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %inside = f32[8,128]{1,0:T(8,128)} add(%p, %p), backend_config={"estimated_cycles":"77"}
}

%fused.2 (p.2: f32[8,128]) -> f32[8,128] {
  %p.2 = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %inside.2 = f32[8,128]{1,0:T(8,128)} add(%p.2, %p.2), backend_config={"estimated_cycles":"77"}
}

%body (arg: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %arg = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%arg), index=1
  %f.1 = f32[8,128]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%fused, backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %t = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%x, %f.1)
}

%condition (arg.1: (s32[], f32[8,128])) -> pred[] {
  %arg.1 = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %end.1 = s32[]{:T(256)} constant(10)
  %i.1 = s32[]{:T(256)} get-tuple-element(%arg.1), index=0
  ROOT %less = pred[]{:T(1024)} compare(%i.1, %end.1), direction=LT
}

ENTRY %main (a: bf16[64,197,768]) -> f32[8,128] {
  %a = bf16[64,197,768]{2,1,0:T(8,128)(2,1)} parameter(0)
  %start = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%a)
  %loop = (s32[], f32[8,128]{1,0:T(8,128)}) while(%start), condition=%condition, body=%body
  %k.1 = bf16[64,197,768]{2,1,0:T(8,128)(2,1)} custom-call(%a, %a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"grid":"64x2x1"
}}, metadata={op_name="jit(step)/jvp(ViT)/pallas_call"}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"6553600000","transcendentals":"0","bytes_accessed":"1"}}}
  %c.1 = (bf16[64,197,768]{2,1,0:T(8,128)(2,1)S(1)}, bf16[64,197,768]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%a)
  %c.2 = bf16[64,197,768]{2,1,0:T(8,128)(2,1)} copy-done(%c.1)
  %r.1 = f32[1024]{0:T(1024)} all-reduce(%x), to_apply=%fused
  %g.1 = f32[8,128]{1,0:T(8,128)} fusion(%a), kind=kLoop, calls=%fused, backend_config={"window_config":{"estimated_cycles":"5"}}
  ROOT %o.1 = f32[8,128]{1,0:T(8,128)S(1)} fusion(%g.1), kind=kLoop, calls=%fused.2, backend_config={"window_config":{"estimated_cycles":"7"}}
}
"""
V3 = tpu.GENERATIONS['v3']


def test_bytes_are_those_of_whole_tiles():
  size = importlib.import_module('hlo').padded_bytes
  assert size('bf16[64,197,768]{2,1,0:T(8,128)(2,1)}') == 64 * 200 * 768 * 2
  # The order says which axes vary fastest: here 64 and 197.
  assert size('f32[64,197,12]{0,1,2:T(8,128)}') == 128 * 200 * 12 * 4
  assert size('(f32[3]{0}, pred[], bf16[2,2])') == 12 + 1 + 8
  assert size('f32[8,128]{1,0:T(8,128)S(1)}', off_chip=True) == 0


# The products of x [8, 196, 256] and w [256, 512], of queries and keys [8, 196, 4, 64] as a
# convolution that is dilated to keep images and heads apart, of a patch embedding, and of a
# convolution with padding; of stacks of eight, an array is taken and one replaced.
PRODUCTS = """%products (x: bf16[8,196,256]) -> bf16[8,196,512] {
  %x = bf16[8,196,256]{2,1,0} parameter(0)
  %w = bf16[256,512,1]{1,0,2} parameter(1)
  %q = bf16[8,4,64,196]{3,2,1,0} parameter(2)
  %k = bf16[196,8,4,64]{0,3,2,1} parameter(3)
  %image = bf16[8,64,64,3]{3,2,1,0} parameter(4)
  %patch = bf16[16,16,3,128]{3,2,1,0} parameter(5)
  %cell = bf16[3,3,3,128]{3,2,1,0} parameter(6)
  %row = bf16[1,196,512]{2,1,0} parameter(7)
  %slice = bf16[1,196,256]{2,1,0} dynamic-slice(%x, %at), dynamic_slice_sizes={1,196,256}
  %plain = bf16[8,196,512]{2,1,0} convolution(%x, %w), window={size=1}, dim_labels=0bf_io0->0bf
  %scores = bf16[8,4,196,196]{2,3,1,0} convolution(%q, %k), window={size=8x4 stride=7x3 lhs_dilate=8x4}, dim_labels=01fb_o01i->01bf
  %embed = bf16[8,4,4,128]{3,0,2,1} convolution(%image, %patch), window={size=16x16 stride=16x16}, dim_labels=b01f_01io->b01f
  %padded = bf16[8,64,64,128]{3,0,2,1} convolution(%image, %cell), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
  ROOT %stack = bf16[8,196,512]{2,1,0} dynamic-update-slice(%plain, %row, %at)
}

ENTRY %main (x.1: bf16[8,196,256]) -> bf16[8,196,512] {
  %x.1 = bf16[8,196,256]{2,1,0} parameter(0)
  ROOT %f = bf16[8,196,512]{2,1,0} fusion(%x.1, %plain), kind=kOutput, calls=%products
}
"""


def test_operations_of_products():
  hlo = importlib.import_module('hlo')
  bodies, _ = hlo.computations(PRODUCTS)
  _, run = hlo.instructions(PRODUCTS)
  products = 8 * 196 * 256 * 512 + 8 * 4 * 196**2 * 64 + 8 * 4**2 * 16**2 * 3 * 128
  products += 8 * (3 * 64 - 2) ** 2 * 3 * 128
  assert hlo.operations(run, hlo.shapes(bodies), bodies) == 2 * products
  assert hlo.moved_bytes(run, hlo.shapes(bodies), bodies) == 2 * 196 * (256 + 512)


def test_the_estimate_of_a_program():
  kernel = 6_553_600_000 // 65_536
  assert tpu.cycles(PROGRAM, V3) == 10 * 100 + kernel + 5 + 7
  stated = PROGRAM.replace('body=%body', 'body=%body, x={"known_trip_count":{"n":"3"}}')
  assert tpu.cycles(stated, V3) == 3 * 100 + kernel + 5 + 7
  # A kernel with few operations takes as long as its bytes.
  moved = PROGRAM.replace('"6553600000"', '"1"').replace(
    'accessed":"1"', 'accessed":"4480"'
  )
  assert tpu.cycles(moved, V3) == 10 * 100 + 10 + 5 + 7


def test_collectives_of_a_program():
  passed = 2 * 1024 * 4
  assert tpu.collectives(PROGRAM) == ({'all-reduce': 1}, passed)
  fused = PROGRAM.replace('%f.1 = ', '%async-collective-start.1 = ')
  counts = {'all-reduce': 1, 'async-collective-start': 10}
  assert tpu.collectives(fused) == (counts, passed)


def test_both_rulers():
  rulers = importlib.import_module('rulers')
  array = 2 * 64 * 200 * 768 / V3.bytes_per_cycle  # cycles to move it once
  cycles = rulers.count(PROGRAM, {'k.1': 200_000, 'f.1': 40, 'g.1': 30}, V3)
  # `o.1` is like `f.1` by its body, but its result stays on the chip.
  assert cycles['estimate'] == pytest.approx(10 * 100 + 200_000 + 5 + 7)
  tile = 4096 / V3.bytes_per_cycle
  common = 10 * 40 + 200_000 + (array + tile) + max(7, tile)
  assert cycles['common'] == pytest.approx(common)
  assert cycles['unscheduled'] == 7
  # Nothing is faster than its products.
  faster = rulers.count(PROGRAM, {'k.1': 2_000, 'f.1': 40, 'g.1': 30}, V3)
  assert faster['common'] == pytest.approx(common - 200_000 + 6_553_600_000 / 65_536)


def test_slices():
  assert tpu.parse('v3') == ('v3', '2x2x1')
  assert tpu.parse('tpu7x:2x2x1') == ('7x', '2x2x1')
  for name in ('v5:2x2', 'v3-8', 'v5e:8x16x2', 'v6e:2x2x2', 'v5e:32x32', 'v3:4x'):
    with pytest.raises(tpu.UserError):
      tpu.parse(name)


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is not None, reason='has libtpu')
def test_without_libtpu_one_line_says_how_to_get_it():
  with pytest.raises(tpu.UserError, match=r'make \.venv-tpu'):
    tpu.prepare()


TIMM = ['--resolution', '32', '--batch', '2', '--rounds', '1']


def test_our_side_of_the_comparisons(capsys, monkeypatch):
  timm_models = importlib.import_module('timm_models')

  class Timm:
    params = 0
    gib = staticmethod(lambda: 0.0)

    def __init__(self, subject, *args):
      timm_models.same_in_timm(subject)

    def run(self, steps):
      pass

  monkeypatch.setattr(timm_models, 'Timm', Timm)
  monkeypatch.setattr(bench, 'SIZES', (64,))
  assert timm_models.main(['vit:mu/16', '--steps', '1', *TIMM]) == 0
  assert capsys.readouterr().out.count('parameters here, 0 there') == 2
  subject = bench.Subject('vit:mu/16', 'float32', (32, 32), {}, {})
  lowered = importlib.import_module('rulers').ours(subject, 2, jax.devices()[:1])
  assert 'stablehlo' in lowered.as_text()


@pytest.mark.peer
def test_timm_beside_ours(capsys):
  pytest.importorskip('timm')
  torch = pytest.importorskip('torch')
  # Other peers run without gradients.
  with torch.enable_grad():
    assert importlib.import_module('timm_models').main(['vit:Ti/16', *TIMM]) == 0
  out = capsys.readouterr().out
  assert 'parameters there' not in out
  assert out.count('ratio') == 2
