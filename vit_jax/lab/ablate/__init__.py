"""`vit_jax ablate`: the paper's ablations, each as one command."""
