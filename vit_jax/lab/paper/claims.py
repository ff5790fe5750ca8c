"""The claims of the ViT paper, and of lectures and reviews of it."""

from collections.abc import Callable
from typing import NamedTuple

from vit_jax.lab.paper.judges import data, inside, models, positions, shape, training
from vit_jax.lab.paper.seen import Seen
from vit_jax.lab.paper.verdicts import LOOK, NOT_TESTED


class Claim(NamedTuple):
  """A claim.

  Attributes:
    text: in our words.
    where: in the paper (arXiv 2010.11929), and who else says it, see READERS.
    judge: of what was seen -> (a member of `verdicts.VERDICTS`, why).
    experiments: those that it rests on, shown below it.
    figures: of `vit_jax figures`, shown below it.
  """

  text: str
  where: str
  judge: Callable[[Seen], tuple[str, str]]
  experiments: tuple[str, ...] = ()
  figures: tuple[str, ...] = ()


# Slides, a tutorial, a lecture, a review and a talk about the paper.
READERS = {
  'Hermann': 'Hermann, "Brownbag on ViT", slides, HTWG Konstanz',
  'Mandal': 'Souvik Mandal, article with a tutorial in PyTorch, 2022',
  'Gupta': 'Saurabh Gupta, lecture "Vision Transformers"',
  'KAIST': 'review of the paper by students of KAIST, 2022',
  'Fox': 'Curtis Fox, talk "This presentation is all you need"',
}


def _as(verdict: str, why: str) -> Callable[[Seen], tuple[str, str]]:
  """Returns the judge of a claim that no number here decides."""
  return lambda seen: (verdict, why)


_NO_DATA = 'JFT-300M is not public, and ImageNet does not come with this library.'

CLAIMS = {
  'Models': (
    Claim(
      'A plain Transformer on a sequence of image patches classifies images well.',
      'abstract; all',
      models.works,
      ('digits',),
    ),
    Claim(
      'ViT-Base, Large and Huge have 86, 307 and 632 million parameters.',
      'Table 1; all',
      models.sizes,
    ),
    Claim(
      'Attention does not know the order of patches: only the position embeddings say '
      'where they are.',
      'section 3.1; KAIST, Hermann',
      models.no_order_of_its_own,
    ),
  ),
  'Data and compute': (
    Claim(
      'Trained on little data, a ViT is behind a ResNet of equal compute, whose '
      'convolutions have an inductive bias for images; with much data it overtakes.',
      'section 4.3, Figures 3 and 4; Mandal, KAIST, Fox',
      data.inductive_bias,
      ('data_size',),
      ('data',),
    ),
    Claim(
      'More data to pre-train on makes a better ViT.',
      'section 4.3, Figure 3; Fox',
      data.more_data,
      ('data_size',),
    ),
    Claim(
      'Pre-training takes the compute of Table 6.',
      'Table 6; KAIST, Fox',
      data.compute_of_pre_training,
    ),
    Claim(
      'For the same accuracy a ViT takes a half to a quarter of the compute of a ResNet; '
      'hybrids are slightly ahead of it at small compute, not at large.',
      'section 4.4, Figure 5; KAIST, Fox',
      _as(
        NOT_TESTED,
        'It takes models over two orders of magnitude of compute. The figure has the '
        "paper's own points, and beside them our ViT and our ResNet, of one size each.",
      ),
      (),
      ('compute',),
    ),
    Claim(
      'Pre-trained on JFT-300M, ViT-H/14 reaches 88.55 % on ImageNet, 94.55 on CIFAR-100 '
      'and 77.63 on VTAB, above BiT-L and Noisy Student for less compute.',
      'Table 2; all',
      _as(NOT_TESTED, _NO_DATA),
      (),
      ('vtab',),
    ),
    Claim(
      'ViT-Tiny of timm fine-tunes on CIFAR-10 in ten epochs.',
      'Mandal',
      _as(
        NOT_TESTED,
        'CIFAR-10 does not come with this library. The recipe is '
        '--config=cifar10_ti16.',
      ),
    ),
  ),
  'Shape of the model': (
    Claim(
      'Scaling depth helps most, scaling width least.',
      'appendix D.2, Figure 8; Gupta, Fox',
      shape.depth,
      ('shape',),
      ('shape',),
    ),
    Claim(
      'Smaller patches, and so more tokens, are better without more parameters.',
      'appendix D.2, Figure 8',
      shape.patches,
      ('shape',),
    ),
    Claim(
      'Position embeddings matter.',
      'appendix D.4, Table 8; Hermann, Gupta, KAIST, Fox',
      positions.positions_matter,
      ('posemb',),
    ),
    Claim(
      'Which kind they are, and where they are added, hardly matters.',
      'appendix D.4, Table 8; Hermann, Gupta, KAIST',
      positions.kinds_are_alike,
      ('posemb',),
    ),
    Claim(
      'A class token and the mean of all patches are as good as each other.',
      'appendix D.3, Figure 9',
      shape.heads,
      ('head',),
    ),
    Claim(
      'But each needs a learning rate of its own: the mean needs a smaller one.',
      'appendix D.3, Figure 9',
      shape.rates,
      ('head',),
    ),
    Claim(
      'Axial attention, along rows and then along columns, is better, at more compute.',
      'appendix D.6, Figure 13',
      shape.axial,
      ('axial',),
    ),
  ),
  'Training and transfer': (
    Claim(
      'Pre-trained with Adam, ResNets transfer better than with SGD.',
      'appendix D.1, Table 7',
      training.optimizer,
      ('optimizer',),
    ),
    Claim(
      'Fine-tuning at a higher resolution helps; position embeddings are interpolated.',
      'section 3.2; Hermann, Gupta, KAIST',
      training.resolution,
      ('digits', 'resolution'),
      ('interpolation',),
    ),
    Claim(
      'Few-shot accuracy by least squares is a cheap stand-in for full accuracy.',
      'section 4.1; KAIST',
      positions.few_shot_ranks,
      ('posemb',),
    ),
    Claim(
      'Pre-training by masked patch prediction is better than training from scratch, '
      'worse than pre-training with labels.',
      'section 4.6, appendix B.1.2',
      training.masked,
      ('masked',),
    ),
  ),
  'Inside the model': (
    Claim(
      'Some heads attend to most of the image already in the lowest layers.',
      'section 4.5, Figure 7 right; Hermann, KAIST, Fox',
      inside.global_at_once,
      (),
      ('distance',),
    ),
    Claim(
      'Other heads are local in the lowest layers; attention distance grows with depth.',
      'section 4.5, Figure 7 right; Hermann, KAIST, Fox',
      inside.distance_grows,
      (),
      ('distance',),
    ),
    Claim(
      'Nearby patches have similar position embeddings; rows and columns can be seen.',
      'section 4.5, Figure 7 centre; Hermann, KAIST, Fox',
      inside.near_patches_are_alike,
      (),
      ('posemb',),
    ),
    Claim(
      'The principal components of the patch embedding look like basis functions for the '
      'fine structure of a patch.',
      'section 4.5, Figure 7 left; Hermann, KAIST',
      _as(
        LOOK,
        'Patches of 4 x 4 grey pixels have sixteen components: look for strokes and '
        'blobs, not textures.',
      ),
      (),
      ('filters',),
    ),
    Claim(
      'The model attends to what matters for the class.',
      'section 4.5, Figures 6 and 14; Hermann, Gupta, KAIST, Fox',
      _as(
        LOOK, 'The maps should follow the strokes of the digits, not the background.'
      ),
      (),
      ('rollout', 'attention', 'class_rollout', 'gradient', 'integrated'),
    ),
  ),
  'Beyond the paper': (
    Claim(
      'With more data and larger models accuracy keeps growing: ViT-G/14 reaches 90.45 % '
      'on ImageNet, and 84.86 % from ten images a class.',
      'arXiv 2106.04560; Fox',
      _as(
        NOT_TESTED,
        'JFT-3B is not public, and ImageNet does not come with this library. The recipe '
        'is --config=vit_g_jft3b.',
      ),
    ),
    Claim(
      'Learned prompts, 1 % of the parameters, transfer better than a linear head, and '
      'prompts in every layer better than prompts in the first alone.',
      'VPT, arXiv 2203.12119; Gupta',
      _as(NOT_TESTED, 'This library does not have prompt tuning yet.'),
    ),
    Claim(
      'Attention in shifted windows, over feature maps that shrink stage by stage, is '
      'better than a plain ViT at less compute.',
      'Swin, arXiv 2103.14030; Gupta',
      _as(NOT_TESTED, f'{_NO_DATA} The recipe is --config=swin_i1k.'),
    ),
    Claim(
      'Objects are found with a plain ViT and a simple pyramid (ViTDet), with a pyramid over '
      'a ResNet (FPN), or as a set that a Transformer predicts (DETR).',
      'arXiv 2203.16527, 1612.03144, 2005.12872; Gupta',
      _as(NOT_TESTED, 'This library does not have detectors yet.'),
    ),
  ),
}
