"""`vit_jax figures`: what a model does, and the results of runs, drawn as for a paper."""
