"""`vit_jax bench`: speed of a model on one device."""
