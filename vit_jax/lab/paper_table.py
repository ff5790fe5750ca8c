"""Table 6 of the ViT paper: its pre-training compute beside that of our models."""

import functools

from vit_jax.lab.published import JFT, TABLE_6

_NOTES = """
  ours: 3 x forward x epochs x 303 million images, at 224 px; products only, a
  multiply-add as 2; a head of 1,000 classes and no hidden layer before it. The 18,291
  classes of JFT would add 0.9 % to R50x1 and 0.5 % or less to the others.
  The ResNets are 3 to 4 % above the paper; without the products of the convolutions
  with their zero padding, which are counted here, they would be within 1 %.
  R50+ViT-L/16: the paper's two rows disagree (859 is not half of 1,668); ours, 834, is.
"""


def rows(models=None) -> list[dict]:
  """Returns a row per entry of TABLE_6 (only those of `models`, if given).

  A row has the keys name, epochs, model, paper and ours (exaFLOPs), and ratio, ours / paper.
  """
  return [
    {
      'name': row.name,
      'epochs': row.epochs,
      'model': row.model,
      'paper': row.exaflops,
      'ours': (ours := _exaflops(row.model, row.epochs)),
      'ratio': ours / row.exaflops,
    }
    for row in TABLE_6
    if models is None or row.model in models
  ]


def _exaflops(model: str, epochs: float) -> float:
  from vit_jax.tools.inspect import flops

  return flops.exa_training(forward(model)[0], epochs * JFT)


@functools.cache
def forward(model: str, size: int = 224) -> tuple[int, int]:
  """Returns (operations of one image of size x size pixels, parameters), 1,000 classes."""
  import jax

  from vit_jax import models
  from vit_jax.tools.inspect import flops

  module = models.build(model, num_classes=1000)
  if hasattr(module, 'scan'):  # the same products, traced as one block
    module = module.clone(scan=True)
  images = jax.ShapeDtypeStruct((1, size, size, 3), 'float32')
  variables = models.shapes_of(module, (size, size, 3))
  params = sum(leaf.size for leaf in jax.tree.leaves(variables['params']))
  return flops.count(module.apply, variables, images), params


def render(rows: list[dict]) -> str:
  """Returns the table as text."""
  lines = [
    'ViT paper, Table 6: exaFLOPs of pre-training',
    '',
    f'  {"":<14}{"epochs":>7}{"paper":>9}{"ours":>9}{"ratio":>8}',
  ]
  lines += [
    f'  {row["name"]:<14}{row["epochs"]:>7}{row["paper"]:>9,}{row["ours"]:>9,.1f}'
    f'{row["ratio"]:>8.3f}  {row["model"]}'
    for row in rows
  ]
  return '\n'.join(lines) + '\n' + _NOTES.rstrip()
