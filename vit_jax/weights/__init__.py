"""Published weights and runs as models of ours, and back.

The way down: `read_header` says what a source is without its arrays, `Header.read` names
its parameters as ours, `fit` brings them to a model, `load` does it all. `write` is the way
back.
"""

from vit_jax.weights.adapt import fit as fit
from vit_jax.weights.export import write as write
from vit_jax.weights.loaded import Loaded as Loaded
from vit_jax.weights.loading import load as load
from vit_jax.weights.reading import complete as complete
from vit_jax.weights.reading import fit_section as fit_section
from vit_jax.weights.reading import from_section as from_section
from vit_jax.weights.reading import lacks_backbone as lacks_backbone
from vit_jax.weights.reading import read as read
from vit_jax.weights.reading import read_header as read_header
from vit_jax.weights.source import Header as Header
from vit_jax.weights.source import Source as Source
