"""`vit_jax inspect`: size and cost of a model, a mesh or a recipe."""
