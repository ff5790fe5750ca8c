"""Objectives without labels, or from texts: masked patches, self-distillation, pairs.

`ENTRIES` are this ring's lines in the tables of the core, see `vit_jax.registry`.
"""

ENTRIES = {
  'task': {
    'dino': 'vit_jax.learn.dino:DINO',
    'mae': 'vit_jax.learn.mae:MAE',
    'masked_patches': 'vit_jax.learn.masked_patches:MaskedPatches',
    'pairs': 'vit_jax.learn.pairs:Pairs',
  },
  'evaluator type': {
    'masked_patches': 'vit_jax.learn.masked_patches:Evaluation',
    'retrieval': 'vit_jax.learn.image_text:Retrieval',
    'zero_shot': 'vit_jax.learn.image_text:ZeroShot',
  },
  'format': {'learn': 'vit_jax.learn.files:FORMATS'},
  'figure': {'reconstruction': 'vit_jax.learn.figures:reconstruction'},
  'figure of runs': {'reconstruction': 'what a masked autoencoder predicts'},
}
