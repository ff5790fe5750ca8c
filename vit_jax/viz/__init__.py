"""What a model does, as arrays to look at; nothing here draws."""

from vit_jax.viz.attention import attention_distance as attention_distance
from vit_jax.viz.attention import rollout as rollout
