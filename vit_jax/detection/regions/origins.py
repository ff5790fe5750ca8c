"""In what the three implementations of two-stage detectors differ.

Weights of one give its published results only with all its details: detectron2's,
torchvision's, and those of mmdetection 2 in the configs of Swin's authors.
"""

import dataclasses

# Weights of dx, dy, dw and dh of a box head, and of the further stages of a cascade
# (Cascade R-CNN, arXiv 1712.00726, section 4).
_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
_STDS = ((0.1, 0.2), (0.05, 0.1), (0.033, 0.067))  # their inverses in mmdetection


@dataclasses.dataclass(frozen=True)
class Origin:
  """The details of an implementation.

  Attributes:
    aligned: RoIAlign moves boxes by half a cell, as it should.
    rounded_anchors: corners of anchors are whole pixels.
    rounded_strides: the stride of a level is the image's side divided by the map's, rounded
      down, which is not a power of 2 where sides are not.
    level_epsilon: added to the side of a box, as a part of the canonical side, before its
      logarithm; `late_epsilon` is added after it.
    clamp_both: offsets of sides are bounded from below, too.
    weights: of the offsets of boxes, by stage.
    low_quality: the rule for anchors that overlap with a target most, see `assign.match`.
    inside_only: anchors across the border of the image take no part in training.
    targets_first: targets precede the proposals they are added to.
    resampled: each stage of a cascade samples anew, among its boxes and the targets.
    stage_losses: weights of the losses of a cascade's stages.
    stage_gradient: factor of gradients from a cascade's stages into the maps.
    mean_of_logits: a cascade averages its logits, not its probabilities.
    least_side: proposals have longer sides; -1 admits boxes without an area.
    nominal: losses of the RPN are divided by the number of anchors to sample, not by the
      number that were sampled.
    rpn_beta, box_beta: where smooth L1 turns linear; 0: L1.
    soft_masks: targets of masks are shares of pixels, not 0 or 1.
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
