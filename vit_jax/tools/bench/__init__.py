"""`python -m vit_jax.tools.bench`: speed of a model on one device."""
