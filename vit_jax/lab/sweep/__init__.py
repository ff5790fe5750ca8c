"""`vit_jax sweep`: a recipe with other values, as a grid of runs."""
