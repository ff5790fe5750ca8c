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
    trains_backbone: whether it changes parameters of the model itself. Otherwise the
      model computes as in evaluation, without dropout and stochastic depth.
    by_block: whether it treats each block on its own, which scanned blocks do not allow.
  """

  trains_backbone: ClassVar[bool] = False
  by_block: ClassVar[bool] = False

  def rules(self, backbone: Backbone) -> Rules:
    """Returns the rules for which of the model's parameters are trained, see `trees`."""
    return [HEAD, REST]

  def make_added(self, backbone: Backbone) -> nn.Module | None:
    """Returns the module that is added, see `tuned.Addition`; None: nothing is.

    Raises:
      ValueError: for a model to which this cannot be added.
    """
    return None

  def merge_added(self, params: dict) -> dict:
    """Merges added parameters, below `tune/`, into the model's own: {name: array}.

    Raises:
      ValueError: where the model cannot express them.
    """
    if added := [name for name in params if name.startswith(f'{SCOPE}/')]:
      raise ValueError(
        f'{added[0]} (one of {len(added)}) was added by config.tune, and no other format '
        'has a name for it: write the tuned parameters alone, vit_jax convert RUN '
        'FILE.safetensors --tuned_only'
      )
    return params
