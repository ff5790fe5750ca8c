"""What was published of every pre-training recipe: the rows of test_recipes.py.

The numbers are those of the ViT paper's Table 3 (arXiv 2010.11929), of big_vision's
configs for AugReg, "Better plain ViT baselines", Mixer and BiT, of "Scaling Vision
Transformers" (arXiv 2106.04560), of ConvNeXt's Table 5 (arXiv 2201.03545) and of Swin's
config.py (microsoft/Swin-Transformer; learning rates there are for batches of 512), of
MViT's configs (facebookresearch/mvit; theirs are for batches of 256), and of
references/classification/train.py in pytorch/vision for ResNet, with weight decay as AdamW
means it: times the rate.
"""

import pytest

I1K, I21K, JFT = 1_281_167, 14_197_122, 303_000_000
I21K_TRAIN = I21K - 51_200


def paper(spec, lr, epochs, wd, decay, dropout, examples, **more):
  """A row of Table 3: batch 4096, warmup 10k."""
  row = dict(batch=4096, warmup=10_000, sigmoid=True, hidden=True)
  row |= dict(lr=lr, epochs=epochs, wd=wd, decay=decay, dropout=dropout)
  return pytest.param(spec, row | dict(examples=examples) | more, id=spec)


def jft(variant, lr, epochs, **more):
  spec = f'vit_jft.py:variant={variant}'
  more = dict(end=1e-5, bias=-10.0, model=variant) | more
  return paper(spec, lr, epochs, 0.1, 'linear', 0.0, JFT, **more)


def i21k(variant, epochs=90):
  spec = f'vit_b16.py:variant={variant},epochs={epochs}'
  more = dict(end=1e-5, bias=-10.0, smoothing=1e-4, model=variant)
  return paper(spec, 1e-3, epochs, 0.03, 'linear', 0.1, I21K - 102_400, **more)


def augreg(data, variant, randaug, mixup, more=''):
  examples, bias = {'i21k': (I21K_TRAIN, -10.0), 'i1k': (I1K * 99 // 100, -6.9)}[data]
  row = dict(batch=4096, warmup=10_000, sigmoid=True, lr=1e-3, epochs=300, wd=0.1)
  row |= dict(decay='cosine', clip=1.0, bias=bias, moment='bfloat16', model=variant)
  row |= dict(randaug=randaug, mixup=mixup, examples=examples, classifier='token')
  row |= dict(posemb_std=None)
  spec = f'augreg_{data}.py:variant={variant}{more}'
  return pytest.param(spec, row, id=spec)


def other(spec, **row):
  return pytest.param(spec, row, id=spec)


RECIPES = [
  *(i21k(v) for v in ('B/16', 'B/32', 'L/16', 'L/32', 'H/14')),
  i21k('L/16', 30),
  jft('B/32', 8e-4, 7),
  jft('B/16', 8e-4, 7),
  jft('L/32', 6e-4, 7),
  jft('L/16', 4e-4, 7),
  jft('H/14', 3e-4, 14),
  *(jft(v, 1e-3, 7, name='bit', hidden=False) for v in ('R50x1', 'R50x2')),
  jft('R101x1', 8e-4, 7, name='bit', hidden=False),
  *(jft(v, 6e-4, 7, name='bit', hidden=False) for v in ('R152x1', 'R152x2')),
  *(jft(v, 8e-4, 7) for v in ('R50+B/32', 'R50+B/16')),
  jft('R50+L/32', 2e-4, 7),
  jft('R50+L/16', 4e-4, 7),
  *(
    paper(
      *(f'vit_i1k.py:variant={v}', 3e-3, 300, 0.3, 'cosine', 0.1, I1K * 99 // 100),
      **dict(clip=1.0, bias=-6.9, model=v),
    )
    for v in ('B/16', 'L/32')
  ),
  augreg('i21k', 'Ti/16', None, 0.0),
  augreg('i21k', 'S/32', None, 0.0),
  augreg('i21k', 'S/16', (2, 0), 0.0),
  augreg('i21k', 'B/32', (2, 10), 0.2),
  augreg('i21k', 'B/16', (2, 10), 0.2),
  augreg('i21k', 'L/16', (2, 15), 0.5),
  augreg('i1k', 'Ti/16', (2, 0), 0.0),
  augreg('i1k', 'S/32', (2, 15), 0.2),
  *(augreg('i1k', v, (2, 15), 0.5) for v in ('S/16', 'B/32', 'B/16', 'L/16')),
  augreg('i1k', 'B/16', None, 0.0, ',aug=none'),
  augreg('i1k', 'B/16', (2, 0), 0.0, ',aug=light1'),
  augreg('i1k', 'B/16', (2, 10), 0.2, ',aug=light2'),
  augreg('i1k', 'B/16', (2, 15), 0.2, ',aug=medium1'),
  augreg('i1k', 'B/16', (2, 15), 0.5, ',aug=medium2'),
  augreg('i1k', 'B/16', (2, 20), 0.5, ',aug=strong1'),
  augreg('i1k', 'B/16', (2, 20), 0.8, ',aug=strong2'),
  augreg('i1k', 'B/16', (2, 0), 0.0, ',aug=light0,names=files'),
  augreg('i1k', 'B/16', (2, 10), 0.2, ',aug=light1,names=files'),
  *(
    other(
      f'vit_s16_i1k.py:epochs={epochs}',
      **dict(batch=1024, examples=I1K * 99 // 100, epochs=epochs, lr=1e-3, wd=0.1),
      **dict(decay='cosine', warmup=10_000, clip=1.0, bias=0.0, moment='bfloat16'),
      **dict(randaug=(2, 10), mixup=0.2, classifier='gap', hidden=True),
      **dict(posemb='sincos2d', model='S/16'),
    )
    for epochs in (90, 150, 300)
  ),
  *(
    other(
      f'vit_g_jft3b.py:variant={variant}',
      **dict(batch=16_384, examples=3 * 10**9, steps=1_000_000, lr=8e-4, wd=0.03),
      **dict(wd_head=3.0, decay='rsqrt', warmup=10_000, clip=1.0, bias=-10.0),
      **dict(sigmoid=True, classifier='map', model=variant, posemb_std=None),
    )
    for variant in ('g/14', 'G/14')
  ),
  *(
    other(
      f'masked_patches.py:fewshot=tfds:dtd{more}',
      **dict(batch=4096, examples=JFT, steps=1_000_000, lr=2e-4, wd=0.1),
      **dict(decay='cosine', warmup=10_000, bias=0.0, classifier='gap', model='B/16'),
      task=dict(name='masked_patches', target=target, rate=rate),
    )
    for more, target, rate in (
      ('', 'mean_color', 0.5),
      (',target=downsized', 'downsized', 0.5),
      (',target=pixels', 'pixels', 0.5),
      (',rate=0.15', 'mean_color', 0.15),
    )
  ),
  other(
    'mixer_i1k.py',
    **dict(batch=4096, examples=I1K * 99 // 100, epochs=300, lr=1e-3, wd=0.1),
    **dict(decay='linear', end=1e-8, warmup=10_000, clip=1.0, bias=-6.9, depth=0.1),
    **dict(sigmoid=True, randaug=(2, 15), mixup=0.5, name='mixer', model='B/16'),
  ),
  *(
    other(
      f'convnext_i1k.py:variant={variant}',
      **dict(batch=4096, examples=I1K * 99 // 100, epochs=300, lr=4e-3, wd=0.05),
      **dict(decay='cosine', end=1e-6, warmup=6_193, clip=None, bias=0.0, depth=depth),
      **dict(
        randaug=(2, 9, 0.5), mixup=0.8, smoothing=0.1, name='convnext', model=variant
      ),
      **dict(cutmix=1.0, erasing=0.25, crop='inception_crop(224, 8, 100)'),
    )
    for variant, depth in (('T', 0.1), ('S', 0.4), ('B', 0.5), ('L', 0.5))
  ),
  *(
    other(
      f'swin_i1k.py:variant={variant}',
      **dict(batch=1024, examples=I1K * 99 // 100, epochs=300, lr=1e-3, wd=0.05),
      **dict(decay='cosine', end=1e-5, warmup=24_773, clip=5.0, bias=0.0, depth=depth),
      **dict(randaug=(2, 9, 0.5), mixup=0.8, smoothing=0.1, name='swin', model=variant),
      **dict(cutmix=1.0, erasing=0.25, crop='inception_crop(224, 8, 100)'),
    )
    for variant, depth in (('T', 0.2), ('S', 0.3), ('B', 0.5))
  ),
  *(
    other(
      f'mvit_i1k.py:variant={variant}',
      **dict(batch=2048, examples=I1K * 99 // 100, epochs=300, lr=2e-3, wd=0.05),
      **dict(decay='cosine', end=8e-6, warmup=43_352, clip=1.0, bias=0.0, depth=depth),
      **dict(randaug=(6, 9, 0.5), mixup=0.8, smoothing=0.1, name='mvit', model=variant),
      **dict(cutmix=1.0, erasing=0.25, crop='inception_crop(224, 8, 100)'),
      decayed=r'.*/(kernel|relative_positions/rows)',
    )
    for variant, depth in (('T', 0.1), ('S', 0.1), ('B', 0.3), ('L', 0.5))
  ),
  *(
    other(
      f'resnet_i1k.py:variant={variant}{more}',
      **dict(batch=batch, examples=I1K * 99 // 100, epochs=90, lr=lr, warmup=warmup),
      **dict(decay='multistep', clip=None, bias=0.0, name='resnet', model=variant),
      # Coupled with a momentum of 0.9, 1e-4 of all parameters.
      **dict(wd=1e-4 / (1 - 0.9), wd_others=1e-4 / (1 - 0.9), zero_init=False),
      **dict(crop='inception_crop(224, 8, 100)'),
    )
    for variant, more, batch, lr, warmup in (
      ('50', '', 256, 0.1, 0),
      ('101', '', 256, 0.1, 0),
      ('50', ',batch=8192,warmup=774', 8192, 3.2, 774),
    )
  ),
  other(
    'bit_i1k.py',
    **dict(batch=4096, examples=I1K * 99 // 100, epochs=90, lr=1.6, wd=1e-3),
    **dict(decay='cosine', warmup=1_000, clip=1.0, bias=0.0, moment='bfloat16'),
    **dict(name='resnet_gn', model='R50'),
  ),
  other(
    'bit_i21k.py',
    **dict(batch=4096, examples=I21K_TRAIN, epochs=90, lr=0.48, wd=1e-3),
    **dict(decay='cosine', warmup=5_000, clip=1.0, bias=-10.0, moment='bfloat16'),
    **dict(sigmoid=True, name='bit', model='R50x1', zero_pad_pool=False),
  ),
]
