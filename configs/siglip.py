"""SigLIP: images and texts from captions (arXiv 2303.15343), or from published towers.

  vit_jax train --config=siglip:data=wds:SHARDS                 # B/16 from scratch, a pod
  vit_jax train --config=siglip:weights=hf:google/siglip-base-patch16-224,data=captions:photos
  vit_jax train --config=siglip:weights=CLIP,data=captions:photos
  vit_jax train --config=siglip:data=shapes                     # bundled
  vit_jax train --config=siglip:debug

`data` is a source with captions: captions:FOLDER, wds:SHARDS, parquet:FOLDER (see
docs/guides/data.md), or shapes. From scratch: batch 32,768 and 100,000 steps of AdamW with
rate 1e-3, b2 0.95 and weight decay 1e-4 of kernels, gradients clipped at norm 1; images are
squeezed to 224 px; captions have 64 tokens; temperature and bias start at ln 10 and -10. All
from the paper. The vocabulary is vocab=FOLDER, with a spiece.model or tokenizer.json, or the
bytes of UTF-8.

weights=SOURCE is SigLIP, CLIP or any other weights with both towers, or a run of this recipe.
Towers, vocabulary, loss, temperature, bias and pixels are then theirs, and training is shorter,
at a lower rate: 1,000 steps of 256 pairs at 1e-5. parts=N embeds a batch in N parts, which
needs the memory of one, and computes the same loss; optim.accum would compute another one.

Evaluations: retrieval on `val`, and zero_shot=SOURCE classifies its split `test`, or
zero_shot_split, by the names of its classes. configs/lit.py locks the image tower.

Shapes: captions of 6 of the 36 kinds and colours never occur in training. `unseen` classifies
these 6, among all 36, by captions that the text tower has not seen.

Hardware: the recipe from scratch fits TPU v5e-256. Expected: 78 % zero-shot on ImageNet with
B/16 on WebLI (not run here, because the data is not available).

Smallest slices: v5e:4x4 (B/16, parts=8; smaller ones were not compiled).
"""

import ml_collections

from vit_jax.config import parse_arg
from vit_jax.text import tokenizer

DEBUG = dict(data='shapes', train='train[:64]', val='val[:32]', batch=16, steps=4)
# A hybrid: a ResNet's root and one block, which sees edges sooner than patches do.
SHAPES = dict(width=96, depth=3, mlp_dim=192, num_heads=6, patch_size=(1, 1))
SHAPES |= dict(stem_blocks=(1,), stem_width=32)
COLOURS = ('red', 'yellow', 'green', 'cyan', 'blue', 'magenta')
KINDS = ('circle', 'square', 'triangle', 'star', 'cross', 'ring')
UNSEEN = [
  f'{colour} {kind}' for colour, kind in zip(COLOURS, reversed(KINDS), strict=True)
]


def get_config(arg=None, lock=False):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    data='',
    train='train',
    val='val',
    weights='',
    variant='B/16',
    res=0,
    loss='sigmoid',
    bias=-10.0,
    vocab=tokenizer.BYTES,
    length=0,
    batch=0,
    parts=1,
    steps=0,
    lr=0.0,
    wd=1e-4,
    zero_shot='',
    zero_shot_split='test',
    dtype='bfloat16',
    seed=0,
  )
  shapes = arg.data == 'shapes'
  tuned = bool(arg.weights) and not lock
  batch = arg.batch or (128 if shapes else 256 if tuned else 32_768)
  c = ml_collections.ConfigDict()
  c.seed = arg.seed
  steps = 65_000 if lock else 1000 if tuned else 100_000
  c.steps = arg.steps or (1200 if shapes else steps)

  c.task = dict(name='pairs')
  if arg.weights:
    c.weights = dict(source=arg.weights)
    c.model = dict(dtype='float32' if shapes else arg.dtype)
  else:
    c.model = dict(name='vit', classifier='map', act='gelu_tanh', norm_eps=1e-6)
    c.model.update(SHAPES if shapes else dict(variant=arg.variant, dtype=arg.dtype))
  tokens = 'tokenize'
  if lock or not arg.weights:
    length = arg.length or (40 if shapes else 16 if lock else 64)
    tokens = f'tokenize({arg.vocab!r}, {length})'
    if arg.vocab != tokenizer.BYTES:
      tokens = f"tokenize({arg.vocab!r}, {length}, clean='big_vision')"
    rules = tokenizer.Rules(length, 'none', None)
    width = 96 if shapes else 768
    c.task.update(loss=arg.loss, bias=arg.bias)
    c.task.text = dict(
      vocab=tokenizer.read(arg.vocab, rules).size,
      width=width,
      depth=2 if shapes else 12,
      mlp_dim=2 * width if shapes else 4 * width,
      num_heads=width // (16 if shapes else 64),
      mask='none',
      pooling='last',
      head_bias=True,
      act='gelu_tanh',
      norm_eps=1e-6,
    )
  c.task.parts = arg.parts
  if lock and arg.weights:
    c.weights.skip = ['pairs/.*']
    c.tune = dict(method='rules', train=['pairs/.*'])

  lr = arg.lr or (1e-5 if tuned else 1e-3)
  c.optim = dict(name='adamw', lr=lr, b2=0.95, wd=arg.wd, clip=1.0)
  c.optim.schedule = dict(decay='cosine', warmup=min(10_000, c.steps // 10))

  res = arg.res or (32 if shapes else 224)
  geometry = f"resize_as_weights({res}, method='bilinear', antialias=True)"
  pp = 'value_range' if shapes else f'decode|{geometry}|value_range'
  c.data = dict(source=arg.data, split=arg.train, batch_size=batch)
  c.data.pp = f'{tokens}|{pp}' if shapes else f'{pp}|{tokens}'
  every = max(c.steps // 10, 1)
  c.checkpoint = dict(every=every)
  c.log = dict(every=max(every // 4, 1))
  if shapes:
    names = [f'{colour} {kind}' for colour in COLOURS for kind in KINDS]
    c.data.classes = [name for name in names if name not in UNSEEN]
    zero_shot = dict(type='zero_shot', tokens=tokens, templates='a {}', every=every)
    zero_shot['names'] = ','.join(names)
    data = dict(source='shapes', split=arg.val, batch_size=batch, pp=pp)
    c.evals = dict(
      seen=dict(data={**data, 'classes': list(c.data.classes)}, **zero_shot),
      unseen=dict(data={**data, 'classes': UNSEEN}, **zero_shot),
    )
    return c
  data = dict(batch_size=min(batch, 1024), pp=pp)
  captions = dict(data, source=arg.data, split=arg.val)
  captions['pp'] = f'{pp}|{tokens[:-1]}, captions=5)' if '(' in tokens else ''
  captions['pp'] = captions['pp'] or f'{pp}|tokenize(captions=5)'
  c.evals = dict(val=dict(type='retrieval', data=captions, every=every))
  c.checkpoint.best = 'val/image_to_text_1'
  if arg.zero_shot:
    data.update(source=arg.zero_shot, split=arg.zero_shot_split)
    c.evals.zero_shot = dict(type='zero_shot', data=data, tokens=tokens, every=every)
  return c
