"""Claims about training and transfer."""

from vit_jax.lab.paper.seen import Seen
from vit_jax.lab.paper.verdicts import (
  DIGITS,
  NOT_SEEN,
  PARTLY,
  compare,
  if_better,
  percent,
)


def optimizer(seen: Seen):
  """Few-shot transfer of a ResNet trained by AdamW, against SGD."""
  of = lambda cell, key: seen.mean('optimizer', cell, key)
  key = next(k for k in seen.cells('optimizer')['adam'] if '5shot' in k)
  adam, sgd = of('adam', key), of('sgd', key)
  return if_better(adam, sgd, DIGITS), (
    f'5-shot on digits after pre-training on shapes with AdamW and with SGD: '
    f'{percent(adam, sgd)} (on shapes themselves '
    f'{percent(of("adam", "test/top1"), of("sgd", "test/top1"))}). The learning rate of SGD '
    "is the best of three, that of AdamW is the recipe's, so this does not refute Table 7, "
    'which is of fine-tuning.'
  )


def resolution(seen: Seen):
  """Accuracy at 16 and, fine-tuned, at 32 pixels."""
  low, high = seen.last('digits', 'test/top1'), seen.last('resolution', 'val/top1')
  verdict = if_better(high, low, DIGITS)
  more = (
    'The digits have 8 x 8 pixels: enlarging them adds no detail, and little was left to '
    'gain. What does show is that the model still works with its resized position '
    'embeddings.'
  )
  return verdict, f'{percent(low, high)} at 16 px and fine-tuned at 32 px. {more}'


def masked(seen: Seen):
  """100 labels after masked patches, against from scratch."""
  found = {
    cell: seen.mean('masked', cell, 'test/top1')
    for cell, numbers in seen.cells('masked').items()
    if 'test/top1' in numbers
  }
  scratch = found.pop('scratch')
  better = compare(max(found.values()), scratch, DIGITS) > 0
  told = ', '.join(f'{percent(value)} ({cell})' for cell, value in found.items())
  return PARTLY if better else NOT_SEEN, (
    f'With 100 labels, {percent(scratch)} from scratch, and after predicting masked patches '
    f'of all training images {told}. The paper, with all labels of ImageNet, is 2 points '
    'above training from scratch and 4 below pre-training with labels, which was not '
    'compared here.'
  )
