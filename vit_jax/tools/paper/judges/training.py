"""Claims about training and transfer."""

from vit_jax.tools.paper.seen import Seen
from vit_jax.tools.paper.verdicts import DIGITS, if_better, percent


def optimizer(seen: Seen):
  """Few-shot transfer of a ResNet trained by AdamW, against SGD."""
  of = lambda cell, key: seen.mean('optimizer', cell, key)
  key = next(k for k in seen.cells('optimizer')['adam'] if '5shot' in k)
  adam, sgd = of('adam', key), of('sgd', key)
  return if_better(adam, sgd, DIGITS), (
    f'Pre-trained on shapes with AdamW and with SGD, few-shot on digits: '
    f'{percent(adam, sgd)} (on shapes themselves '
    f'{percent(of("adam", "test/top1"), of("sgd", "test/top1"))}). The rate of SGD was '
    "chosen among three, that of AdamW is the recipe's: this does not refute Table 7."
  )


def resolution(seen: Seen):
  """Accuracy at 16 and, fine-tuned, at 32 pixels."""
  low, high = seen.last('digits', 'test/top1'), seen.last('resolution', 'val/top1')
  verdict = if_better(high, low, DIGITS)
  more = (
    'The digits have 8 x 8 pixels: enlarging them adds nothing to see, and the model '
    'was nearly right before. What is seen is that the resized table keeps its meaning.'
  )
  return verdict, f'{percent(low, high)} at 16 and at 32 pixels. {more}'


def masked(seen: Seen):
  """100 labels after masked patches, against from scratch."""
  found = {
    cell: seen.mean('masked', cell, 'test/top1')
    for cell, numbers in seen.cells('masked').items()
    if 'test/top1' in numbers
  }
  scratch = found.pop('scratch')
  verdict = if_better(max(found.values()), scratch, DIGITS)
  told = ', '.join(f'{percent(value)} ({cell})' for cell, value in found.items())
  return verdict, (
    f'With 100 labels, from scratch {percent(scratch)}; after predicting masked patches of '
    f'all training images {told}. The paper has 2 points over training from scratch on '
    'all of ImageNet, and 4 below pre-training with labels.'
  )
