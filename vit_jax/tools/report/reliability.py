"""The reliability diagram, as SVG."""

from vit_jax.tools.report.calibration import Calibration

_SIDE, _LEFT, _TOP = 240, 40, 8  # units of the picture


def diagram(found: Calibration) -> str:
  """Returns an SVG: accuracy by confidence as bars, the diagonal, the gaps between."""
  parts = []
  for i, n in enumerate(found.counts):
    if not n:
      continue
    left, right = found.edges[i], found.edges[i + 1]
    accuracy, confidence = found.accuracy[i], found.confidence[i]
    low, high = sorted((accuracy, confidence))
    label = f'{n:,} of confidence {confidence:.1%}: {accuracy:.1%} right'
    parts.append(
      f'<g><title>{label}</title>'
      f'<rect class="hit" {_box(left, right, 0, 1)}/>'
      f'<rect class="bar" {_box(left, right, 0, accuracy)}/>'
      f'<rect class="gap" {_box(left, right, low, high)}/></g>'
    )
  for i in range(6):
    value = i / 5
    x, y = _x(value), _y(value)
    parts.append(f'<text x="{x:.0f}" y="{_TOP + _SIDE + 16}">{value:.0%}</text>')
    parts.append(f'<text class="y" x="{_LEFT - 6}" y="{y + 4:.0f}">{value:.0%}</text>')
    parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{_SIDE}"/>')
  parts.append(f'<path class="diagonal" d="M{_x(0)} {_y(0)}L{_x(1)} {_y(1)}"/>')
  middle = _LEFT + _SIDE / 2
  parts.append(f'<text x="{middle}" y="{_TOP + _SIDE + 34}">confidence</text>')
  return (
    f'<svg class="reliability" viewBox="0 0 {_LEFT + _SIDE + 18} {_TOP + _SIDE + 40}" '
    f'role="img" aria-label="Reliability diagram: expected calibration error '
    f'{found.ece:.1%}; the table below has its numbers">{"".join(parts)}</svg>'
  )


def _x(value: float) -> float:
  return _LEFT + _SIDE * value


def _y(value: float) -> float:
  return _TOP + _SIDE * (1 - value)


def _box(left, right, low, high) -> str:
  return (
    f'x="{_x(left) + 0.5:.1f}" y="{_y(high):.1f}" '
    f'width="{_SIDE * (right - left) - 1:.1f}" height="{_SIDE * (high - low):.1f}"'
  )
