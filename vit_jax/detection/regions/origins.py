"""Differences between detectron2, torchvision and mmdetection.

Weights reproduce their published results only with all details of the implementation that
trained them. mmdetection stands for version 2 with the configs of Swin's authors.
"""

import dataclasses

# Weights of dx, dy, dw and dh in the box head of each stage. A cascade has three stages
# (Cascade R-CNN, arXiv 1712.00726, section 4).
_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
# mmdetection states the inverses, as standard deviations: one for dx and dy, one for dw and
# dh.
_STDS = ((0.1, 0.2), (0.05, 0.1), (0.033, 0.067))


@dataclasses.dataclass(frozen=True)
class Origin:
  """Details of one implementation.

  Attributes:
    aligned: whether RoIAlign shifts boxes by half a cell, as it should.
    rounded_anchors: whether corners of anchors are rounded to whole pixels.
    rounded_strides: whether the stride of a level is the image's side divided by the map's,
      rounded down. For some sides, it is no power of 2.
    level_epsilon, late_epsilon: guards against rounding in the level of a box. level_epsilon
      is added to the box's side, in units of the canonical side, before the logarithm.
      late_epsilon is added after it.
    clamp_both: whether offsets of sides are clamped from below as well.
    weights: factors by which each box stage multiplies dx, dy, dw and dh.
    low_quality: the rule for the best anchors of a target, see `assign.match`.
    inside_only: whether anchors that cross the border of the image are not trained.
    targets_first: whether targets come before the proposals (True) or after them (False).
    resampled: whether each stage of a cascade samples again, from its boxes and the targets.
    stage_losses: weights of the losses of a cascade's stages.
    stage_gradient: factor of the gradients from each stage of a cascade into the maps.
    mean_of_logits: whether a cascade averages logits (True) or probabilities (False).
    least_side: proposals must have longer sides than this; -1 admits boxes without an area.
    nominal: whether losses of the RPN are divided by the number of anchors to sample (True) or
      by the number that were sampled (False).
    rpn_beta, box_beta: where smooth L1 becomes linear; 0 means L1.
    soft_masks: whether the target of a mask's cell is the fraction that the object covers
      (True) or only 0 or 1 (False).
    grow_masks: whether masks grow by a cell before they are pasted, see `masks.paste`.
    first_class: the number that the implementation gives to the first class.
  """

  aligned: bool = True
  rounded_anchors: bool = False
  rounded_strides: bool = False
  level_epsilon: float = 1e-8
  late_epsilon: float = 0.0
  clamp_both: bool = False
  weights: tuple[tuple[float, ...], ...] = _WEIGHTS
  low_quality: str = 'tied'
  inside_only: bool = False
  targets_first: bool = False
  resampled: bool = False
  stage_losses: tuple[float, ...] = (1.0, 1.0, 1.0)
  stage_gradient: float = 1 / 3
  mean_of_logits: bool = False
  least_side: float = 0.0
  nominal: bool = True
  rpn_beta: float = 0.0
  box_beta: float = 0.0
  soft_masks: bool = False
  grow_masks: bool = False
  first_class: int = 0


ORIGINS = {
  'detectron2': Origin(),
  'torchvision': Origin(
    aligned=False,
    rounded_anchors=True,
    rounded_strides=True,
    level_epsilon=0.0,
    late_epsilon=1e-6,
    least_side=1e-3,
    nominal=False,
    rpn_beta=1 / 9,
    box_beta=1 / 9,
    soft_masks=True,
    grow_masks=True,
    first_class=1,
  ),
  'mmdetection': Origin(
    level_epsilon=1e-6,
    clamp_both=True,
    weights=tuple((1 / a, 1 / a, 1 / b, 1 / b) for a, b in _STDS),
    low_quality='reassigned',
    inside_only=True,
    targets_first=True,
    resampled=True,
    stage_losses=(1.0, 0.5, 0.25),
    stage_gradient=1.0,
    mean_of_logits=True,
    least_side=-1.0,
    nominal=False,
    rpn_beta=1 / 9,
  ),
}
