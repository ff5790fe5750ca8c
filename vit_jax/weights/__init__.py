"""Loads weights, published or from a run, into our models, and writes them in other formats.

`read_header` reads the facts about a source without its arrays. `Header.read` reads the
parameters under our names, and `fit` fits them to a model. `load` does all of this, and
`write` writes files.
"""

from vit_jax.weights.adapt import fit as fit
from vit_jax.weights.export import write as write
from vit_jax.weights.image_text import complete_task as complete_task
from vit_jax.weights.loaded import Loaded as Loaded
from vit_jax.weights.loading import complete as complete
from vit_jax.weights.loading import fit_section as fit_section
from vit_jax.weights.loading import from_section as from_section
from vit_jax.weights.loading import lacks_backbone as lacks_backbone
from vit_jax.weights.loading import load as load
from vit_jax.weights.loading import read as read
from vit_jax.weights.loading import read_header as read_header
from vit_jax.weights.source import Header as Header
from vit_jax.weights.source import Source as Source
