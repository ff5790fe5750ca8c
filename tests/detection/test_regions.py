"""Anchors, box codes, labels, samples and suppression against detectron2's results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import GOLDEN
from vit_jax.detection.boxes import iou
from vit_jax.detection.regions import anchors, assign, coding, suppression

# Compiled once for all tests; run operation by operation they take several times as long.
encode = jax.jit(coding.encode)
decode = jax.jit(coding.decode, static_argnames='clamp_both')
match = jax.jit(assign.match, static_argnames='low_quality')
sample = jax.jit(assign.sample, static_argnums=(2, 3))
detections = jax.jit(
  suppression.detections, static_argnames=('most', 'candidates', 'soft')
)


@jax.jit
def keep(boxes, scores, threshold, valid, *classes):
  """Calls `suppression.keep` with boxes in order of falling score."""
  order = jnp.argsort(-scores, stable=True)
  arrays = (jnp.asarray(x)[order] for x in (valid, *classes))
  return suppression.keep(boxes[order], threshold, *arrays)[jnp.argsort(order)]


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
  encoded = encode(src, g['dst'], weights)
  np.testing.assert_allclose(encoded, g[f'encoded_{i}'], rtol=1e-5, atol=1e-5)

  def same(ours, theirs):  # relative to a box's size, as rounding is
    side = np.abs(theirs).max(-1, keepdims=True) + 1
    np.testing.assert_allclose(ours / side, theirs / side, atol=1e-5)

  same(decode(g['deltas_in'], src, weights), g[f'decoded_{i}'])
  classes = decode(g['deltas_classes'].reshape(20, 3, 4), src[:, None], weights)
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
  assert coding.sides(decode(shrink, box, ones, True)) == pytest.approx(1.6, 1e-5)
  assert (coding.sides(decode(shrink, box, ones)) < 0.1).all()


def test_gradients_of_padding_are_finite():
  total = lambda x: coding.encode(jnp.zeros(4), x, (1.0,) * 4).sum()
  assert np.isfinite(jax.jit(jax.grad(total))(np.zeros(4, np.float32))).all()


RULES = (0.3, 0.7, 'tied'), (0.3, 0.7, None), (0.5, 0.5, None), (0.6, 0.6, None)
RULES += (0.7, 0.7, None), (0.5, 0.5, 'tied')


@pytest.mark.parametrize('i', range(6))
def test_match(i):
  g = load('matching')
  padded = np.concatenate([g['iou'], np.ones((2, 450), np.float32)])
  index, label = match(padded, np.arange(9) < 7, *RULES[i])
  np.testing.assert_array_equal(index, g[f'matches_{i}'])
  np.testing.assert_array_equal(label, g[f'labels_{i}'])


def test_overlaps_and_matches_of_ties():
  g = load('matching')
  overlap = jax.jit(iou)(g['targets'][:, None], g['anchors'][None])
  np.testing.assert_allclose(overlap, g['iou'], atol=1e-6)
  for i in range(3):
    index, label = match(g['tie_iou'], np.ones(3, bool), *RULES[i])
    np.testing.assert_array_equal(index, g[f'tie_matches_{i}'])
    np.testing.assert_array_equal(label, g[f'tie_labels_{i}'])


def test_match_without_targets_and_reassigned():
  g = load('matching')
  _, label = match(g['iou'], np.zeros(7, bool), *RULES[0])
  np.testing.assert_array_equal(label, g['labels_empty'])
  # Box 0 overlaps most with target 0, but is the best of target 1; target 2 has no box.
  overlap = np.array([[0.8, 0.1], [0.6, 0.0], [0.2, 0.0], [0.9, 0.9]], np.float32)
  valid = np.array([True, True, True, False])
  index, label = match(overlap, valid, 0.3, 0.7, 'reassigned')
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


def test_samples_that_are_not_full():
  priority = np.linspace(0, 1, 9, dtype=np.float32)
  drawn = sample(priority, np.full(9, -1), 12, 6)
  assert not drawn.valid.any()
  assert (assign.labels_of_sample(drawn, 9) == -1).all()
  drawn = sample(priority, np.array([1, 0] * 4 + [1]), 5, 2)
  assert drawn.index.tolist() == [0, 2, 1, 3, 5]
  assert drawn.positive.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize('i', range(4))
def test_sample(i):
  g = load('matching')
  number, share, background = g[f'sample_args_{i}']
  theirs = g[f'sample_labels_{i}']
  label = np.where(theirs == -1, -1, theirs != background)
  most = int(number * share)
  drawn = sample(g[f'sample_priority_{i}'], label, int(number), most)
  index = np.array(drawn.index)
  positive = np.array(drawn.positive & drawn.valid)
  negative = np.array(~drawn.positive & drawn.valid)
  np.testing.assert_array_equal(index[positive], g[f'sample_pos_{i}'])
  np.testing.assert_array_equal(index[negative], g[f'sample_neg_{i}'])
  labels = np.full(450, -1)
  labels[g[f'sample_neg_{i}']], labels[g[f'sample_pos_{i}']] = 0, 1
  np.testing.assert_array_equal(assign.labels_of_sample(drawn, 450), labels)


def by_score(survivors, scores):
  """Returns the places of boxes that are survivors, the best first."""
  survivors = np.flatnonzero(survivors)
  return survivors[np.argsort(-scores[survivors], kind='stable')]


@pytest.mark.parametrize('threshold', [0.5, 0.7])
def test_suppression(threshold):
  g = load('nms')
  boxes = np.pad(g['boxes'], ((0, 7), (0, 0)), constant_values=9)
  scores = np.pad(g['scores'], (0, 7), constant_values=2)
  classes, valid = np.pad(g['classes'], (0, 7)), np.arange(405) < 398
  for name, more in (('keep', ()), ('batched_keep', (classes,))):
    survivors = keep(boxes, scores, threshold, valid, *more)
    expected = g[f'{name}_{int(10 * threshold)}']
    np.testing.assert_array_equal(by_score(survivors, scores), expected)


def test_suppression_of_ties_of_a_chain_and_of_nothing():
  g = load('nms')
  for tenths in (3, 5):
    survivors = keep(g['tie_boxes'], g['tie_scores'], tenths / 10, np.ones(13, bool))
    expected = g[f'tie_keep_{tenths}']
    np.testing.assert_array_equal(by_score(survivors, g['tie_scores']), expected)
  # An overlap of 1/2 does not exceed 1/2.
  boxes = np.float32([[0, 0, 4, 8], [0, 0, 8, 8]])
  assert keep(boxes, np.float32([2, 1]), 0.5, np.ones(2, bool)).all()
  # Each box overlaps with the next alone: greedily every second one stays.
  x = np.arange(40, dtype=np.float32)
  boxes = np.stack([x, 0 * x, x + 2, 0 * x + 1], 1)
  survivors = keep(boxes, -x, 0.3, np.ones(40, bool))
  assert survivors.tolist() == [True, False] * 20
  assert not keep(boxes, -x, 0.3, np.zeros(40, bool)).any()
  none = suppression.keep(jnp.zeros((0, 4)), 0.3, jnp.ones(0, bool))
  assert none.shape == (0,)


def greedy(boxes, scores, threshold, classes):
  """Returns bool [n], by the definition: a loop over boxes by falling score."""
  area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
  survivors = np.zeros(len(boxes), bool)
  for i in np.argsort(-scores, kind='stable'):
    low = np.maximum(boxes[i, :2], boxes[:, :2])
    high = np.minimum(boxes[i, 2:], boxes[:, 2:])
    common = (high - low).clip(0).prod(1)
    over = common > np.float32(threshold) * (area + area[i] - common)
    survivors[i] = not (over & survivors & (classes == classes[i])).any()
  return survivors


def crowds(n, cases=40):
  """Returns boxes, scores, classes: many ties, copies, boxes without an area."""
  rng = np.random.default_rng(0)
  corner = rng.integers(0, 12, (cases, n, 2))
  sides = rng.integers(0, 11, (cases, n, 2))
  boxes = np.concatenate([corner, corner + sides], -1).astype(np.float32)
  scores = rng.integers(1, 20, (cases, n)).astype(np.float32) / 20
  return boxes, scores, rng.integers(0, 3, (cases, n))


def test_suppression_is_the_loop_whatever_the_padding():
  boxes, scores, classes = crowds(30)
  real = np.random.default_rng(1).permutation(39) < 30  # anywhere among padding

  def padded(x, value):
    out = np.full((len(x), 39, *x.shape[2:]), value, x.dtype)
    out[:, real] = x
    return out

  run = jax.jit(jax.vmap(keep, (0, 0, None, None, 0)))
  for threshold in (0.3, 0.5, 0.7):
    # Padding covers everything, scores best, and in other rows is not a number.
    for corner, score in ((0.0, 2.0), (np.nan, np.nan)):
      args = [padded(boxes, corner), padded(scores, score)]
      args[0][:, ~real, 2:] += 30
      survivors = np.array(run(*args, threshold, real, padded(classes, 0)))
      assert not survivors[:, ~real].any()
      for ours, *case in zip(survivors[:, real], boxes, scores, classes, strict=True):
        np.testing.assert_array_equal(ours, greedy(*case[:2], threshold, case[2]))


@pytest.mark.parametrize('soft', [False, True])
def test_detections_of_padding_and_of_nothing(soft):
  boxes, scores, _ = (x[0] for x in crowds(20))
  likely = np.stack([scores, scores[::-1], scores / 2], 1)
  options = dict(size=np.array([20, 20]), least=0.05, threshold=0.5, most=15, soft=soft)
  function = functools.partial(detections, **options)
  expected = function(boxes, likely, np.ones(20, bool))
  assert expected['valid'].all()
  pad = lambda x: np.pad(x, ((0, 6), (0, 0)), constant_values=np.nan)
  valid = np.arange(26) < np.array([20, 0])[:, None]
  found = jax.vmap(lambda valid: function(pad(boxes), pad(likely), valid))(valid)
  for key, x in expected.items():
    np.testing.assert_array_equal(found[key][0], x, err_msg=key)
  assert not found['valid'][1].any()
  assert found['complete'][1]
  assert not found['boxes'][1].any()


def test_no_proposals_of_an_image_without_a_size():
  anchor = anchors.anchors((2, 2), (8, 8), anchors.cell((16,), (0.5, 1, 2)))
  levels = [jnp.ones(12)], [jnp.zeros((12, 4))], [anchor]
  find = jax.jit(
    lambda size, least: suppression.proposals(
      *levels, size, before=5, after=4, least=least
    )
  )
  found = find(np.zeros(2), 0.0)
  assert not found['valid'].any()
  assert not found['boxes'].any()
  # mmdetection keeps boxes without an area, which suppress none.
  assert find(np.zeros(2), -1.0)['valid'].all()
  # Sides of 8 pixels: proposals are longer than the shortest side that is allowed.
  assert find(np.full(2, 8), 7.9)['valid'].any()
  assert not find(np.full(2, 8), 8.0)['valid'].any()


def test_soft_suppression_of_copies_and_of_what_was_left_out():
  # The second box is a copy that scores too little to be a detection.
  boxes = np.float32([[0, 0, 8, 8], [0, 0, 8, 8], [2, 0, 8, 8], [9, 9, 12, 12]])
  likely = np.float32([[0.9], [0.01], [0.8], [0.3]])
  # The first box and the third overlap by the threshold: it decays.
  options = dict(size=np.array([20, 20]), least=0.05, threshold=0.75, soft=True)
  call = lambda most, candidates: detections(
    *(boxes, likely, np.ones(4, bool)), **options, most=most, candidates=candidates
  )
  found = call(3, 4)
  assert found['rows'].tolist() == [0, 3, 2]
  np.testing.assert_allclose(found['scores'], [0.9, 0.3, 0.2], rtol=1e-6)
  assert found['complete']
  # Of two candidates the second, decayed, scores less than the one that was left out.
  assert not call(2, 2)['complete']
  assert call(1, 2)['complete']


def test_detections_score_more_than_the_least():
  boxes = np.float32([[0, 0, 8, 8], [9, 9, 12, 12]])
  args = boxes, np.float32([[0.5], [0.25]]), np.ones(2, bool), np.array([20, 20])
  found = detections(*args, least=0.25, threshold=0.5, most=2)
  assert found['valid'].tolist() == [True, False]


@pytest.mark.parametrize('i', range(4))
def test_detections(i):
  g = load('nms')
  least, threshold, most, rows = g[f'det_args_{i}'].tolist()
  boxes = g['det_in_boxes'][:, :4] if rows == 1 else g['det_in_boxes']
  options = dict(least=least, threshold=threshold, most=int(most))
  args = boxes, g['det_in_probs'][:, :-1], np.ones(60, bool), g['det_image_size']
  found = detections(*args, **options)
  n = len(g[f'det_scores_{i}'])
  assert found['complete']
  assert found['valid'].sum() == n
  for key in ('boxes', 'scores', 'labels', 'rows'):
    theirs = g[f'det_{"classes" if key == "labels" else key}_{i}']
    # The same numbers are compared; pixels pass through a clip alone.
    np.testing.assert_allclose(found[key][:n], theirs, atol=1e-5)


def test_too_few_candidates():
  """Too few may lose detections; 'complete' says when none is lost."""
  g = load('nms')
  args = g['det_in_boxes'], g['det_in_probs'][:, :-1], np.ones(60, bool)
  for least, threshold, _, _ in (g[f'det_args_{i}'].tolist() for i in range(3)):
    options = dict(size=g['det_image_size'], least=least, threshold=threshold)
    few = detections(*args, **options, most=30, candidates=40)
    every = detections(*args, **options, most=30)
    shown = [found['scores'][found['valid']] for found in (few, every)]
    assert np.array_equal(*shown) or not few['complete']


def test_soft_suppression():
  """Against the loop of arXiv 1704.04503, figure 2, in NumPy."""
  g = load('nms')
  boxes = g['det_in_boxes'][:, :4]
  scores = g['det_in_probs'][:, :-1].copy()
  options = dict(least=0.05, threshold=0.5, most=50, soft=True)
  args = boxes, scores, np.ones(60, bool), g['det_image_size']
  found = detections(*args, **options)
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
  logits = [g[f'logits_{i}'] for i in range(5)]
  deltas = [g[f'deltas64_{i}'] / np.float32(64) for i in range(5)]
  call = lambda logit, delta, size: function(logit, delta, size=size)
  found = jax.jit(jax.vmap(call))(logits, deltas, g['sizes'])
  assert found['valid'].sum(1).tolist() == g['num'].tolist()
  np.testing.assert_array_equal(found['logits'], g['proposal_logits'])
  np.testing.assert_allclose(found['boxes'], g['proposal_boxes'], atol=1e-3)
