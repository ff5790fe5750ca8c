"""Draws figures for a paper from arrays. Only this package imports matplotlib.

Functions return a `Figure` without pyplot's global state, for `save` or a notebook.
Widths are those of one column of text, 5.5 inches.
"""

from vit_jax.explain.plots.charts import Panel as Panel
from vit_jax.explain.plots.charts import Series as Series
from vit_jax.explain.plots.charts import heads as heads
from vit_jax.explain.plots.charts import panels as panels
from vit_jax.explain.plots.pictures import TOP as TOP
from vit_jax.explain.plots.pictures import filters as filters
from vit_jax.explain.plots.pictures import heat as heat
from vit_jax.explain.plots.pictures import maps as maps
from vit_jax.explain.plots.pictures import tiles as tiles
from vit_jax.explain.plots.style import save as save
