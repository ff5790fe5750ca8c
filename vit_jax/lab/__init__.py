"""Experiments on top of the library.

`ENTRIES` are this ring's lines in the tables of the core, see `vit_jax.registry`.
"""

ENTRIES = {
  'source': {
    'shapes': 'vit_jax.lab.data.shapes:Shapes',
    'vtab': 'vit_jax.lab.data.vtab:Vtab',
    'fgvc': 'vit_jax.lab.data.fgvc:Fgvc',
  },
  'target of a source': {'vtab': 'NAME', 'fgvc': 'NAME'},
  'command': {
    'sweep': ('vit_jax.lab.sweep', 'trains a recipe with other values, or an ablation'),
    'vtab': ('vit_jax.lab.vtab', 'fine-tunes weights on the tasks of VTAB-1k'),
    'paper': ('vit_jax.lab.paper', "checks the ViT paper's claims in miniature"),
  },
  'figure': {
    'compute': 'vit_jax.lab.figures:compute',
    'data': 'vit_jax.lab.figures:data',
  },
  'figure of runs': {
    'compute': 'accuracy against compute, the paper beside (figure 5, Table 6)',
    'data': 'accuracy against pre-training data, the paper beside (figure 3, Table 5)',
  },
}
