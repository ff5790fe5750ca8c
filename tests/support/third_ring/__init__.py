"""An example of a ring: a package of its own on top of an installed vit_jax.

Its project names it in an entry point, `[project.entry-points."vit_jax.rings"]`.
"""

ENTRIES = {
  'model': {'edges': 'third_ring.parts:FAMILY'},
  'op': {'negative': 'third_ring.parts:negative'},
  'task': {'confident': 'third_ring.parts:Confident'},
}
