"""Anchors, box codes, labels, samples and suppression against detectron2's results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import GOLDEN
from vit_jax.detection.boxes import iou
from vit_jax.detection.regions import anchors, assign, coding, suppression


@functools.cache
def load(name):
  with np.load(GOLDEN / 'twostage' / f'{name}.npz') as file:
    return dict(file)


@pytest.mark.parametrize('i', range(3))
def test_anchors(i):
  g = load('anchors')
  for level, (grid, stride) in enumerate(
    zip(g[f'grids_{i}'], g[f'strides_{i}'], strict=True)
  ):
    sizes = g[f'sizes_{i}'][min(level, len(g[f'sizes_{i}']) - 1)]
    cell = anchors.cell(sizes, g[f'ratios_{i}_{level}'])
    # float32 of numbers up to 500
    np.testing.assert_allclose(cell, g[f'cell_{i}_{level}'], atol=1e-4)
    ours = anchors.anchors(grid, (stride, stride), cell, g[f'offset_{i}'])
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, g[f'anchors_{i}_{level}'], atol=1e-4)


@pytest.mark.parametrize('i', range(4))
def test_box_coding(i):
  g = load('box_coding')
  weights, src = g['weights'][i], g['src']
  np.testing.assert_allclose(
    coding.encode(src, g['dst'], weights), g[f'encoded_{i}'], rtol=1e-5, atol=1e-5
  )

  def same(ours, theirs):  # relative to a box's size, as rounding is
    side = np.abs(theirs).max(-1, keepdims=True) + 1
    np.testing.assert_allclose(ours / side, theirs / side, atol=1e-5)

  same(coding.decode(g['deltas_in'], src, weights), g[f'decoded_{i}'])
  classes = coding.decode(g['deltas_classes'].reshape(20, 3, 4), src[:, None], weights)
  same(classes, g[f'decoded_classes_{i}'].reshape(20, 3, 4))


def test_clip_and_both_sides():
  g = load('box_coding')
  np.testing.assert_allclose(
    coding.clip(g['decoded_1'], g['clip_size']), g['clipped_1'], atol=1e-4
  )
  assert pytest.approx(float(g['scale_clamp'])) == coding.CLAMP
  # mmdetection bounds shrinking, too: a side times 16 / 1000.
  box, shrink = np.float32([0, 0, 100, 100]), np.float32([0, 0, -9, -9])
  ones = (1.0,) * 4
  assert coding.sides(coding.decode(shrink, box, ones, True)) == pytest.approx(
    1.6, 1e-5
  )
  assert (coding.sides(coding.decode(shrink, box, ones)) < 0.1).all()


def test_gradients_of_padding_are_finite():
  f = lambda x: coding.encode(jnp.zeros(4), x, (1.0,) * 4).sum()
  assert np.isfinite(jax.grad(f)(jnp.zeros(4))).all()


RULES = (0.3, 0.7, 'tied'), (0.3, 0.7, None), (0.5, 0.5, None), (0.6, 0.6, None)
RULES += (0.7, 0.7, None), (0.5, 0.5, 'tied')


@pytest.mark.parametrize('i', range(6))
def test_match(i):
  g = load('matching')
  padded = jnp.concatenate([g['iou'], np.ones((2, 450), np.float32)])
  valid = jnp.arange(9) < 7
  index, label = assign.match(padded, valid, *RULES[i])
  np.testing.assert_array_equal(index, g[f'matches_{i}'])
  np.testing.assert_array_equal(label, g[f'labels_{i}'])
  np.testing.assert_allclose(
    iou(g['targets'][:, None], g['anchors'][None]), g['iou'], atol=1e-6
  )


@pytest.mark.parametrize(('i', 'rule'), [(0, 0), (1, 1), (2, 2)])
def test_match_of_ties(i, rule):
  g = load('matching')
  index, label = assign.match(jnp.array(g['tie_iou']), jnp.ones(3, bool), *RULES[rule])
  np.testing.assert_array_equal(index, g[f'tie_matches_{i}'])
  np.testing.assert_array_equal(label, g[f'tie_labels_{i}'])


def test_match_without_targets_and_reassigned():
  g = load('matching')
  _, label = assign.match(jnp.array(g['iou']), jnp.zeros(7, bool), 0.3, 0.7, 'tied')
  np.testing.assert_array_equal(label, g['labels_empty'])
  # Box 0 overlaps most with target 0, but is the best of target 1; target 2 has no box.
  overlap = jnp.array([[0.8, 0.1], [0.6, 0.0], [0.2, 0.0], [0.9, 0.9]])
  valid = jnp.array([True, True, True, False])
  index, label = assign.match(overlap, valid, 0.3, 0.7, 'reassigned')
  assert (index.tolist(), label.tolist()) == ([1, 0], [1, 0])


@pytest.mark.parametrize('rule', ['tied', 'reassigned'])
def test_match_in_one_program_with_overlaps(rule):
  """Against loops: the best box of a target is found though XLA may compute IoU twice."""
  rng = np.random.default_rng(0)
  corner = rng.uniform(0, 90, (1020, 2))
  boxes = np.concatenate([corner, corner + rng.uniform(1, 50, (1020, 2))], 1)
  targets, boxes = np.split(boxes.astype(np.float32), [20])
  valid = np.arange(20) < 18

  @jax.jit
  def run(targets, boxes):
    overlap = iou(targets[:, None], boxes[None])
    return assign.match(overlap, valid, 0.3, 0.7, rule)

  overlap = np.array(jax.jit(iou)(targets[:, None], boxes[None]))[valid]
  best, index = overlap.max(0), overlap.argmax(0)
  label = np.where(best >= 0.7, 1, np.where(best < 0.3, 0, -1))
  for i, row in enumerate(overlap):
    if rule == 'tied' or row.max() >= 0.3:
      label[row == row.max()] = 1
      if rule == 'reassigned':
        index[row == row.max()] = i
  for ours, expected in zip(run(targets, boxes), (index, label), strict=True):
    np.testing.assert_array_equal(ours, expected)


def test_sample_of_nothing():
  priority, label = jnp.linspace(0, 1, 9), jnp.full(9, -1)
  drawn = assign.sample(priority, label, 12, 0.5)
  assert not drawn.valid.any()
  assert (assign.labels_of_sample(drawn, 9) == -1).all()


@pytest.mark.parametrize('i', range(4))
def test_sample(i):
  g = load('matching')
  number, share, background = g[f'sample_args_{i}']
  theirs = g[f'sample_labels_{i}']
  label = np.where(theirs == -1, -1, theirs != background)
  args = (
    jnp.array(g[f'sample_priority_{i}']),
    jnp.array(label),
    int(number),
    float(share),
  )
  drawn = assign.sample(*args)
  index = np.array(drawn.index)
  positive = np.array(drawn.positive & drawn.valid)
  negative = np.array(~drawn.positive & drawn.valid)
  np.testing.assert_array_equal(index[positive], g[f'sample_pos_{i}'])
  np.testing.assert_array_equal(index[negative], g[f'sample_neg_{i}'])
  labels = np.full(450, -1)
  labels[g[f'sample_neg_{i}']], labels[g[f'sample_pos_{i}']] = 0, 1
  np.testing.assert_array_equal(assign.labels_of_sample(drawn, 450), labels)


@pytest.mark.parametrize('threshold', [0.5, 0.7])
@pytest.mark.parametrize('batched', [False, True])
def test_suppression(threshold, batched):
  g = load('nms')
  classes = jnp.array(g['classes']) if batched else None
  boxes = jnp.pad(g['boxes'], ((0, 7), (0, 0)), constant_values=9.0)
  scores = jnp.pad(g['scores'], (0, 7), constant_values=2.0)
  classes = jnp.pad(classes, (0, 7)) if batched else None
  valid = jnp.arange(405) < 398
  kept = np.flatnonzero(suppression.keep(boxes, scores, threshold, valid, classes))
  kept = kept[np.argsort(-g['scores'][kept], kind='stable')]
  name = f'{"batched_" if batched else ""}keep_{int(10 * threshold)}'
  np.testing.assert_array_equal(kept, g[name])


@pytest.mark.parametrize('tenths', [3, 5])
def test_suppression_of_ties(tenths):
  g = load('nms')
  boxes, scores = g['tie_boxes'], g['tie_scores']
  kept = suppression.keep(boxes, scores, tenths / 10, jnp.ones(13, bool))
  kept = np.flatnonzero(kept)
  kept = kept[np.argsort(-scores[kept], kind='stable')]
  np.testing.assert_array_equal(kept, g[f'tie_keep_{tenths}'])


def test_suppression_of_a_chain_and_of_nothing():
  # Each box overlaps with the next alone: greedily every second one stays.
  x = np.arange(40, dtype=np.float32)
  boxes = np.stack([x, 0 * x, x + 2, 0 * x + 1], 1)
  kept = suppression.keep(boxes, -x, 0.3, jnp.ones(40, bool))
  assert kept.tolist() == [True, False] * 20
  assert suppression.keep(boxes[:0], -x[:0], 0.3, jnp.ones(0, bool)).shape == (0,)
  assert not suppression.keep(boxes, -x, 0.3, jnp.zeros(40, bool)).any()


def greedy(boxes, scores, threshold, classes):
  """Returns bool [n], by the definition: a loop over boxes by falling score."""
  area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
  kept = np.zeros(len(boxes), bool)
  for i in np.argsort(-scores, kind='stable'):
    low = np.maximum(boxes[i, :2], boxes[:, :2])
    high = np.minimum(boxes[i, 2:], boxes[:, 2:])
    common = (high - low).clip(0).prod(1)
    over = common > np.float32(threshold) * (area + area[i] - common)
    kept[i] = not (over & kept & (classes == classes[i])).any()
  return kept


def crowds(n, cases=40):
  """Returns boxes, scores, classes: many ties, copies, boxes without an area."""
  rng = np.random.default_rng(0)
  corner = rng.integers(0, 12, (cases, n, 2))
  sides = rng.integers(0, 11, (cases, n, 2))
  boxes = np.concatenate([corner, corner + sides], -1).astype(np.float32)
  scores = rng.integers(1, 20, (cases, n)).astype(np.float32) / 20
  return boxes, scores, rng.integers(0, 3, (cases, n))


@pytest.mark.parametrize('padding', [0, 9])
@pytest.mark.parametrize('threshold', [0.3, 0.5, 0.7])
def test_suppression_is_the_loop_whatever_the_padding(threshold, padding):
  boxes, scores, classes = crowds(30)
  order = np.random.default_rng(1).permutation(30 + padding)
  real = order < 30
  place = np.flatnonzero(real)  # rows of padding are anywhere among the others

  def padded(x, value):
    out = np.full((len(x), 30 + padding, *x.shape[2:]), value, x.dtype)
    out[:, place] = x
    return jnp.array(out)

  # Padding covers everything, scores best, and in other rows is not a number.
  for corner, score in ((0.0, 2.0), (np.nan, np.nan)):
    args = [padded(boxes, corner), padded(scores, score), padded(classes, 0)]
    args[0] = args[0].at[:, ~real, 2:].add(30)
    call = lambda b, s, c: suppression.keep(b, s, threshold, jnp.array(real), c)
    kept = np.array(jax.jit(jax.vmap(call))(*args))
    assert not kept[:, ~real].any()
    for ours, *case in zip(kept[:, place], boxes, scores, classes, strict=True):
      np.testing.assert_array_equal(ours, greedy(*case[:2], threshold, case[2]))


@pytest.mark.parametrize('soft', [False, True])
def test_detections_of_padding_and_of_nothing(soft):
  boxes, scores, _ = (x[0] for x in crowds(20))
  likely = np.stack([scores, scores[::-1], scores / 2], 1)
  function = functools.partial(
    suppression.detections,
    size=np.array([20, 20]),
    least=0.05,
    threshold=0.5,
    most=15,
    soft=soft,
  )
  expected = function(jnp.array(boxes), jnp.array(likely), jnp.ones(20, bool))
  assert expected['valid'].all()
  pad = lambda x: jnp.pad(x, ((0, 6), (0, 0)), constant_values=np.nan)
  valid = jnp.arange(26) < jnp.array([20, 0])[:, None]
  found = jax.vmap(lambda valid: function(pad(boxes), pad(likely), valid))(valid)
  for key, x in expected.items():
    np.testing.assert_array_equal(found[key][0], x, err_msg=key)
  assert not found['valid'][1].any()
  assert found['complete'][1]
  assert not found['boxes'][1].any()


def test_no_proposals_of_an_image_without_a_size():
  anchor = anchors.anchors((2, 2), (8, 8), anchors.cell((16,), (0.5, 1, 2)))
  levels = [jnp.ones(12)], [jnp.zeros((12, 4))], [anchor]
  args = dict(before=5, after=4)
  found = suppression.proposals(*levels, jnp.zeros(2), **args)
  assert not found['valid'].any()
  assert not found['boxes'].any()
  # mmdetection keeps boxes without an area, which suppress none.
  found = suppression.proposals(*levels, jnp.zeros(2), **args, least=-1.0)
  assert found['valid'].all()


def test_soft_suppression_of_copies_and_of_what_was_left_out():
  # The second box is a copy that scores too little to be a detection.
  boxes = jnp.float32([[0, 0, 8, 8], [0, 0, 8, 8], [2, 0, 8, 8], [9, 9, 12, 12]])
  likely = jnp.float32([[0.9], [0.01], [0.8], [0.3]])
  call = lambda most, candidates: suppression.detections(
    boxes,
    likely,
    jnp.ones(4, bool),
    np.array([20, 20]),
    least=0.05,
    threshold=0.75,  # the overlap of the first box and the third: it decays
    most=most,
    candidates=candidates,
    soft=True,
  )
  found = call(3, 4)
  assert found['rows'].tolist() == [0, 3, 2]
  np.testing.assert_allclose(found['scores'], [0.9, 0.3, 0.2], rtol=1e-6)
  assert found['complete']
  # Of two candidates the second, decayed, scores less than the one that was left out.
  assert not call(2, 2)['complete']
  assert call(1, 2)['complete']


@pytest.mark.parametrize('i', range(4))
def test_detections(i):
  g = load('nms')
  least, threshold, most, rows = g[f'det_args_{i}'].tolist()
  boxes = g['det_in_boxes'][:, :4] if rows == 1 else g['det_in_boxes']
  function = functools.partial(
    suppression.detections, least=least, threshold=threshold, most=int(most)
  )
  probabilities = g['det_in_probs'][:, :-1]
  probabilities, boxes = jnp.array(probabilities), jnp.array(boxes)
  valid = jnp.ones(60, bool)
  found = function(boxes, probabilities, valid, g['det_image_size'])
  n = len(g[f'det_scores_{i}'])
  assert found['complete']
  assert found['valid'].sum() == n
  for key in ('boxes', 'scores', 'labels', 'rows'):
    theirs = g[f'det_{"classes" if key == "labels" else key}_{i}']
    # The same numbers are compared; pixels pass through a clip alone.
    np.testing.assert_allclose(found[key][:n], theirs, atol=1e-5)
  few = function(boxes, probabilities, valid, g['det_image_size'], candidates=40)
  # Too few candidates may lose detections; 'complete' says when none is lost.
  same = np.array_equal(few['scores'][few['valid']], found['scores'][found['valid']])
  assert same or not few['complete']


def test_soft_suppression():
  """Against the loop of arXiv 1704.04503, figure 2, in NumPy."""
  g = load('nms')
  boxes = g['det_in_boxes'][:, :4]
  scores = g['det_in_probs'][:, :-1].copy()
  found = suppression.detections(
    jnp.array(boxes),
    jnp.array(scores),
    jnp.ones(60, bool),
    g['det_image_size'],
    least=0.05,
    threshold=0.5,
    most=50,
    soft=True,
  )
  h, w = g['det_image_size']
  boxes = boxes.clip(0, [w, h, w, h])
  overlap = np.array(iou(boxes[:, None], boxes[None]))
  left, rows = np.where(scores > 0.05, scores, -np.inf), []
  for _ in range(50):
    row, label = np.unravel_index(left.argmax(), left.shape)
    rows.append((row, label, left[row, label]))
    decay = np.where(overlap[row] >= 0.5, 1 - overlap[row], 1)
    left[:, label] *= decay
    left[row, label] = -np.inf
  rows = [r for r in rows if r[2] > 0.05]
  n = len(rows)
  assert found['valid'].sum() == n > 30
  ours = zip(*(np.array(found[k][:n]) for k in ('rows', 'labels')), strict=True)
  assert [*ours] == [r[:2] for r in rows]
  np.testing.assert_allclose(found['scores'][:n], [r[2] for r in rows], rtol=1e-5)


def test_proposals():
  g = load('rpn_select')
  before, after, threshold, least = g['args'].tolist()
  sizes = (16, 32, 64, 128, 200)
  every = [
    anchors.anchors(grid, (4 << i, 4 << i), anchors.cell((size,), (0.5, 1, 2)))
    for i, (grid, size) in enumerate(zip(g['grids'], sizes, strict=True))
  ]
  function = functools.partial(
    suppression.proposals,
    anchors=every,
    before=int(before),
    after=int(after),
    threshold=threshold,
    least=least,
  )
  logits = [jnp.array(g[f'logits_{i}']) for i in range(5)]
  deltas = [jnp.array(g[f'deltas64_{i}'] / np.float32(64)) for i in range(5)]
  call = lambda logit, delta, size: function(logit, delta, size=size)
  found = jax.jit(jax.vmap(call))(logits, deltas, jnp.array(g['sizes']))
  assert found['valid'].sum(1).tolist() == g['num'].tolist()
  np.testing.assert_array_equal(found['logits'], g['proposal_logits'])
  np.testing.assert_allclose(found['boxes'], g['proposal_boxes'], atol=1e-3)
