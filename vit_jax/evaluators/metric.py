"""How the numbers that evaluators return are read."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Metric:
  """How a number is shown, and which of two is the better.

  Attributes:
    percent: it is a fraction, shown as a percentage.
    larger_is_better: None where neither is, as of a count.
    std: suffix of the name under which its standard deviation stands.
    detail: left out of the summary of a run.
  """

  percent: bool = False
  larger_is_better: bool | None = None
  std: str | None = None
  detail: bool = False

  def text(self, value: float) -> str:
    """Returns the number for a person: '98.06%', '50,000', '0.0813'."""
    if self.percent:
      return f'{value:.2%}'
    return f'{value:,.0f}' if float(value).is_integer() else f'{value:.4g}'


def find(metrics: dict[str, Metric], name: str) -> Metric:
  """Returns the first of {regex: metric} that matches the whole name, or a plain one."""
  matches = (m for pattern, m in metrics.items() if re.fullmatch(pattern, name))
  return next(matches, Metric())
