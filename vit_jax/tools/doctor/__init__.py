"""`vit_jax doctor`: whether training works here, see __main__."""
