"""Measurements of a model: the config's `evals`. See `contracts.Evaluator`."""

from collections.abc import Callable

from vit_jax.evaluators.base import Metric, match_metric
from vit_jax.registry import Registry

EVALUATORS = Registry(
  'evaluator type',
  {
    'classification': 'vit_jax.evaluators.classification:Classification',
    'fewshot': 'vit_jax.evaluators.fewshot:FewShot',
    'knn': 'vit_jax.evaluators.knn:KNN',
    'linear_probe': 'vit_jax.evaluators.linear_probe:LinearProbe',
  },
)

# The metric that every task measures in training.
_TRAIN = {'loss': Metric(larger_is_better=False)}


def build(type: str, mesh, check_stop: Callable | None = None, model=None, **section):
  """Builds the evaluator of a type, see `contracts.Evaluator`.

  Args:
    **section: the other keys of its config section, without `every`.
  """
  return EVALUATORS[type](mesh, check_stop or (lambda: None), model, **section)


def declarations(source: str, evals: dict) -> dict[str, Metric]:
  """Returns {regex: metric} of an evaluation or 'train'; {} for an unknown source."""
  if source in evals:
    return EVALUATORS[evals[source]['type']].METRICS
  return _TRAIN if source == 'train' else {}


def find_metric(key: str, evals: dict) -> Metric:
  """Returns the declaration of a metric such as 'test/top1', or `Metric()` without one."""
  source, _, name = key.partition('/')
  return match_metric(declarations(source, evals), name)
