"""What a model does, as pure functions of arrays; `plots` and `boxes` draw it."""

from vit_jax.viz.attention import attention_distance as attention_distance
from vit_jax.viz.attention import class_rollout as class_rollout
from vit_jax.viz.attention import rollout as rollout
from vit_jax.viz.filters import filters_pca as filters_pca
from vit_jax.viz.positions import posemb_similarity as posemb_similarity
from vit_jax.viz.saliency import gradient_times_input as gradient_times_input
from vit_jax.viz.saliency import integrated_gradients as integrated_gradients
from vit_jax.viz.slots import slot_colours as slot_colours
