"""`vit_jax export`: a model as a program that runs without this library."""
