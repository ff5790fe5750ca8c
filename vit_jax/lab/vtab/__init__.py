"""`vit_jax vtab`: how well weights transfer, by the tasks of VTAB-1k or FGVC."""
