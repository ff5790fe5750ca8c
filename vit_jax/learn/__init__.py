"""Objectives that need no labels: masked autoencoders, masked patches, self-distillation.

`ENTRIES` are this ring's lines in the tables of the core, see `vit_jax.registry`.
"""

ENTRIES = {
  'task': {
    'dino': 'vit_jax.learn.dino:DINO',
    'mae': 'vit_jax.learn.mae:MAE',
    'masked_patches': 'vit_jax.learn.masked_patches:MaskedPatches',
  },
  'evaluator type': {'masked_patches': 'vit_jax.learn.masked_patches:Evaluation'},
  'format': {'mae': 'vit_jax.learn.files:FORMATS'},
  'figure': {'reconstruction': 'vit_jax.learn.figures:reconstruction'},
  'figure of runs': {'reconstruction': 'what a masked autoencoder predicts'},
}
