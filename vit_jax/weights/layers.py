"""Rules for layers as PyTorch names and stores them."""

from vit_jax.weights import transforms as t
from vit_jax.weights.rename import Rule


def pair(theirs: str, ours: str, kernel=t.dense, bias=t.same) -> tuple[Rule, Rule]:
  """A layer with a weight and a bias."""
  return (
    Rule(f'{theirs}.weight', f'{ours}/kernel', kernel),
    Rule(f'{theirs}.bias', f'{ours}/bias', bias),
  )


def norm(theirs: str, ours: str) -> tuple[Rule, Rule]:
  """Rules of a normalisation's scale and bias."""
  return (
    Rule(f'{theirs}.weight', f'{ours}/scale'),
    Rule(f'{theirs}.bias', f'{ours}/bias'),
  )


def fused(theirs: str, ours: str, names: tuple[str, ...]) -> tuple[Rule, Rule]:
  """Projections that the file holds as one."""
  number = len(names)
  return (
    Rule(
      f'{theirs}.weight',
      tuple(f'{ours}/{name}/kernel' for name in names),
      t.joined(t.heads_kernel, number),
    ),
    Rule(
      f'{theirs}.bias',
      tuple(f'{ours}/{name}/bias' for name in names),
      t.joined(t.heads_bias, number),
    ),
  )
