"""LiT: a text tower for a locked image tower (arXiv 2111.07991), by SigLIP's loss.

  vit_jax train --config=lit:weights=SOURCE,data=captions:photos
  vit_jax train --config=lit:weights=SOURCE,data=shapes      # bundled
  vit_jax train --config=lit:debug                           # nothing is locked

The image tower is any published ViT or a run, whose outputs before the head are the vectors of
images. It gets no update, no weight decay and no moments. The text tower is new: all arguments
are those of configs/siglip.py, and the recipe is SigLiT's: 65,000 steps of 32,768 pairs at
rate 1e-3, captions of 16 tokens. Temperature and bias start at ln 10 and -10. big_vision's
example for COCO is batch=512,steps=5000,wd=0.01,bias=-2.71.

Images are augmented as before, so features are not cached.

Hardware: as configs/siglip.py, with a third of its cost. Expected: 75.7 % zero-shot on
ImageNet with L/16 on 4 billion pairs (the LiT paper; not run here).

Smallest slices: v3:2x2 or v5e:2x4 (with a batch of 8,192).
"""

import siglip


def get_config(arg=None):
  return siglip.get_config(arg, lock=True)
