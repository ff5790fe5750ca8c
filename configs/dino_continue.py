"""Continues any backbone on your own images, without labels, by DINO.

  vit_jax train --config=dino_continue:weights=SOURCE,data=FOLDER
  vit_jax train --config=dino_continue:weights=SOURCE,data=FOLDER,knn=LABELLED
  vit_jax train --config=dino_continue:debug

SOURCE is a ViT: a file, a hub folder, a name or the folder of a run. FOLDER has images in
`train`, with or without folders of classes. knn=LABELLED, with splits `train` and `val`,
measures the features of the average; compare with those of SOURCE:
vit_jax evaluate SOURCE --data LABELLED --split val --probe knn.

The heads of published backbones are not published, and the gradients of a random head, at
the head's own rate, ruin a backbone. So the backbone learns at `backbone` times that rate.
Weight decay stays at 0.04, and the momentum of the average goes from `ema` to 1.
keep_heads=True takes the heads of SOURCE, a run or an author's file of a training run;
`outputs` is the number of their prototypes. Crops of 224 and 112 px fit patches of 14 and
16 px. Other parts are as in dino_i1k, with KoLeo.

docs/tutorials/no_labels.md measures these choices.

Hardware: any; S/14 takes 9.7 GiB at batch 64 (`vit_jax inspect --tpu v5e:1x1`).

Smallest slices: v3:2x2 or v5e:2x4 (S/14).
"""

import dino_i1k

from vit_jax.config import parse_arg

DEBUG = dict(data='digits', train='train[:64]', batch=16, steps=4, outputs=64)


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    **{key: x for key, x in dino_i1k.ARGUMENTS.items() if key != 'epochs'},
    variant='S/16',
    steps=2000,
    outputs=4096,
    keep_heads=False,
    backbone=0.1,
    ema=0.99,
  )
  arg.epochs = 0.0
  arg.local = arg.local or (0 if arg.data == 'digits' else 112)
  blur = 'p=(1.0, 0.1, 0.5), pillow=True'
  c = dino_i1k.start(arg, batch=64, epochs=1.0, area=32, blur=blur)
  del c.epochs
  c.steps = arg.steps
  if arg.weights and not arg.keep_heads:
    c.weights.skip = ['head/.*', 'dino/.*']
  c.task = dict(name='dino', head=dict(outputs=arg.outputs), koleo=0.1)
  c.task.koleo_group = min(c.data.batch_size, 64)
  options = dict(ema=arg.ema, wd_end=None, lr_starts=[])
  c.optim = dino_i1k.optimizer(arg.lr or 5e-4, 1.0, **options)
  c.optim.lr_rules = [('dino/.*', 1.0), ('.*', arg.backbone)]
  return c
