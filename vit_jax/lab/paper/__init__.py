"""`vit_jax paper`: the experiments of the ViT paper at a small scale, and one page of them."""
