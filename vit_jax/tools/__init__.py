"""Command-line tools: `vit_jax NAME`, or `python -m vit_jax.tools.NAME`."""
