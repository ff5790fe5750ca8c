"""`vit_jax figures`: attention, filters and positions of a model, and results of runs, as in a paper."""
