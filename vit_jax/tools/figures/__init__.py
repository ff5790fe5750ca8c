"""`vit_jax figures`: what a model does, and what runs came to, drawn as for a paper."""
