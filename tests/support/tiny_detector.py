"""A stand-in for a detector, as a page of `models/`: queries look at patches, twice."""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.models.family import Family


class TinyDetector(nn.Module):
  """Two layers of queries that attend to patches of 8 x 8 pixels."""

  num_classes: int | None = 10
  queries: int = 6
  width: int = 32

  @nn.compact
  def __call__(self, images, mask=None, train=False, features=True):
    D, Q = self.width, self.queries
    x = nn.Conv(D, (8, 8), (8, 8), name='stem')(images)  # [B, h, w, D]
    rows, columns = (
      self.param(f'{axis}_embedding', nn.initializers.normal(0.5), (n, D))
      for axis, n in (('row', x.shape[1]), ('column', x.shape[2]))
    )
    tokens = nn.gelu(x + rows[:, None] + columns).reshape(len(x), -1, D)
    query = self.param('query', nn.initializers.normal(1.0), (Q, D))
    query = jnp.broadcast_to(query, (len(x), Q, D))
    out = {'stem': x}
    answers = []
    for i in range(2):
      look = nn.softmax(query @ nn.Dense(D, name=f'key_{i}')(tokens).swapaxes(1, 2))
      query = query + look @ nn.Dense(D, name=f'value_{i}')(tokens)
      query = query + nn.Dense(D, name=f'mlp_{i}')(nn.gelu(query))
      answer = nn.Dense(self.num_classes + 5, name=f'head_{i}')(query)
      answers.append((answer[..., :-4], nn.sigmoid(answer[..., -4:])))
    (aux_logits, aux_boxes), (logits, boxes) = answers
    out |= {'aux_logits': aux_logits[None], 'aux_boxes': aux_boxes[None]}
    return {'logits': logits, 'boxes': boxes}, out


FAMILY = Family(
  outputs='boxes',
  model=TinyDetector,
  variant=lambda name: {},
  blocks=r'(?P<block>key)_(?P<layer>\d+)/.*',
  before='stem/.*',
  branch_ends='mlp_.*',
  prompts=(),
  stems=('stem/kernel',),
  stride=lambda fields: (8, 8),
  any_size=lambda fields: False,
  tiny=(),
)
