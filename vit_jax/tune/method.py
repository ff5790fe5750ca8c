"""The base and contract of the tuning methods."""

import dataclasses
from typing import ClassVar

import flax.linen as nn

from vit_jax.tune.backbone import Backbone
from vit_jax.tune.tuned import SCOPE

Rules = list[tuple[str, bool]]

HEAD = ('head/.*', True)
REST = ('.*', False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """One way to tune: its fields are the options of the config's section `tune`.

  Attributes:
    trains_backbone: whether it trains parameters of the model other than the head. If not,
      the model runs as in evaluation, without dropout and stochastic depth.
    by_block: whether it treats each block separately, which scanned blocks do not allow.
  """

  trains_backbone: ClassVar[bool] = False
  by_block: ClassVar[bool] = False

  def rules(self, backbone: Backbone) -> Rules:
    """Returns the rules that say which parameters of the model are trained, see `trees`."""
    return [HEAD, REST]

  def make_added(self, backbone: Backbone) -> nn.Module | None:
    """Returns the module to add to the model, see `tuned.Addition`; None adds nothing.

    Raises:
      ValueError: if the method does not fit the model.
    """
    return None

  def merge_added(self, params: dict) -> dict:
    """Merges the added parameters, below `tune/`, into the model's own: {name: array}.

    Raises:
      ValueError: if the model's own parameters cannot express the added ones.
    """
    if added := [name for name in params if name.startswith(f'{SCOPE}/')]:
      raise ValueError(
        f'{added[0]} (one of {len(added)}) was added by config.tune, and no other format '
        'has a name for it: write the tuned parameters alone, vit_jax convert RUN '
        'FILE.safetensors --tuned_only'
      )
    return params
