"""`python -m vit_jax.tools.inspect`: size and cost of a model, a mesh or a recipe."""
