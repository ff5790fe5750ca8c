"""Makes twostage/mask_rcnn_v2_torchvision, a random narrow model of torchvision.

Run it by the Python of `make peer`: .venv-peer/bin/python tests/golden/mask_rcnn_v2.py
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import BatchNorm2d
from torchvision.models import detection, resnet
from torchvision.models.detection import backbone_utils, faster_rcnn, mask_rcnn, rpn
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler

FOLDER = Path(__file__).parent / 'twostage'
NAME = 'mask_rcnn_v2_torchvision'
SIZES, CANVAS, N = [(64, 96), (56, 80)], (64, 96), 3
ANCHORS = ((12,), (20,), (32,), (48,), (64,))
CLASSES, CHANNELS = 6, 8
OPTIONS = dict(
  rpn_pre_nms_top_n_train=60,
  rpn_pre_nms_top_n_test=40,
  rpn_post_nms_top_n_train=40,
  rpn_post_nms_top_n_test=24,
  rpn_batch_size_per_image=48,
  box_batch_size_per_image=24,
  box_score_thresh=0.15,
  box_detections_per_img=12,
)
FIELDS = dict(
  origin='torchvision',
  samples=2,
  anchor_sizes=ANCHORS,
  before=(60, 40),
  after=(40, 24),
  anchor_sample=48,
  box_sample=24,
  least_score=0.15,
  most=12,
)


def build():
  """Returns a narrow maskrcnn_resnet50_fpn_v2 whose heads have unequal widths."""
  body = resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1])
  body.inplanes = 8
  body.conv1, body.bn1 = torch.nn.Conv2d(3, 8, 7, 2, 3, bias=False), BatchNorm2d(8)
  for i, planes in enumerate((2, 4, 8, 16)):
    stage = body._make_layer(resnet.Bottleneck, planes, 1 + (i == 1), 1 + (i > 0))
    setattr(body, f'layer{i + 1}', stage)
  layers = {f'layer{i + 1}': str(i) for i in range(4)}
  widths = [8, 16, 32, 64]
  backbone = backbone_utils.BackboneWithFPN(
    body, layers, widths, CHANNELS, norm_layer=BatchNorm2d
  )
  anchors = rpn.AnchorGenerator(ANCHORS, ((0.5, 1.0, 2.0),) * len(ANCHORS))
  return detection.MaskRCNN(
    backbone,
    rpn_anchor_generator=anchors,
    rpn_head=rpn.RPNHead(CHANNELS, 3, conv_depth=2),
    box_head=faster_rcnn.FastRCNNConvFCHead(
      (CHANNELS, 7, 7), [8, 8], [24], norm_layer=BatchNorm2d
    ),
    box_predictor=faster_rcnn.FastRCNNPredictor(24, CLASSES),
    mask_head=mask_rcnn.MaskRCNNHeads(CHANNELS, [6] * 3, 1, norm_layer=BatchNorm2d),
    mask_predictor=mask_rcnn.MaskRCNNPredictor(6, 6, CLASSES),
    **OPTIONS,
  )


def randomise(model) -> None:
  for module in model.modules():
    if isinstance(module, BatchNorm2d):
      for x, low in ((module.weight, 0.7), (module.running_var, 0.5)):
        x.copy_(low + torch.rand_like(x))
      for x in (module.bias, module.running_mean):
        x.copy_(0.2 * torch.randn_like(x))
  # Predictions differ more than at the start of training, so that rounding decides nothing.
  for head in (model.rpn.head.cls_logits, model.rpn.head.bbox_pred):
    for x in head.parameters():
      x.copy_(0.3 * torch.randn_like(x))
  roi = model.roi_heads
  for head in (roi.box_predictor.cls_score, roi.mask_predictor.mask_fcn_logits):
    for x in head.parameters():
      x.mul_(4)


def examples(rng):
  """Returns (uint8 images on the canvas, targets)."""
  images = rng.integers(0, 256, (2, 8, 12, 3), np.uint8).repeat(8, 1).repeat(8, 2)
  low = rng.uniform(0, 30, (2, N, 2))
  boxes = np.concatenate([low, low + rng.uniform(12, 25, (2, N, 2))], -1)
  boxes, labels = boxes.astype(np.float32), rng.integers(0, CLASSES - 1, (2, N))
  cells = rng.integers(0, 2, (2, N, 16, 24), np.uint8)
  masks = cells.repeat(4, 2).repeat(4, 3)
  for b, (h, w) in enumerate(SIZES):
    images[b, h:] = images[b, :, w:] = masks[b, :, h:] = masks[b, :, :, w:] = 0
  return images, boxes, labels, masks


def sample_by_priority(sampler, rng, record: dict, name: str) -> None:
  """Makes a sampler take the candidates with the smallest random numbers."""

  def sample(labels):
    rows = [rng.random(len(x), np.float32) for x in labels]
    record[name] = np.stack(
      [np.pad(x, (0, max(map(len, rows)) - len(x))) for x in rows]
    )
    out = [], []
    for x, row in zip(labels, rows, strict=True):
      number = sampler.batch_size_per_image
      most = int(number * sampler.positive_fraction)
      for part, chosen in ((x >= 1, out[0]), (x == 0, out[1])):
        index = torch.where(part)[0]
        index = index[torch.from_numpy(row)[index].argsort()][:most]
        chosen.append(torch.zeros(len(x), dtype=torch.bool).index_fill_(0, index, True))
        most = number - len(index)
    return out

  sampler.sample = sample


def main() -> None:
  torch.manual_seed(0)
  torch.set_grad_enabled(False)
  rng, x = np.random.default_rng(0), {}
  model = build()
  randomise(model)
  model.transform.resize = lambda image, target: (image, target)
  BalancedPositiveNegativeSampler.__call__ = lambda self, labels: self.sample(labels)
  for part, name in ((model.rpn, 'rpn'), (model.roi_heads, 'roi')):
    sample_by_priority(part.fg_bg_sampler, rng, x, f'{name}_priority')
  images, boxes, labels, masks = examples(rng)
  pixels = [
    torch.from_numpy(image[:h, :w].transpose(2, 0, 1).astype(np.float32) / 255)
    for image, (h, w) in zip(images, SIZES, strict=True)
  ]
  keep = {k: v.clone() for k, v in model.state_dict().items()}
  (FOLDER / NAME).mkdir(exist_ok=True)
  save_file(keep, FOLDER / NAME / 'model.safetensors')
  config = dict(framework='torchvision')
  config |= dict(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])
  config['vit_jax'] = {'fields': FIELDS, 'image_size': CANVAS}
  text = json.dumps(config, indent=1)
  (FOLDER / NAME / 'config.json').write_text(text + '\n', encoding='utf-8')

  x |= dict(image=images, sizes=np.array(SIZES), num_targets=np.full(2, N))
  x |= dict(target_boxes=boxes, target_labels=labels)
  bits = np.packbits(masks.reshape(2, N, -1), axis=-1)
  x['target_masks_bits'] = bits

  def hook(module, name, function=lambda out: out):
    module.register_forward_hook(
      lambda m, args, out: seen.update({name: function(out)})
    )

  def pad(rows):
    rows = [np.asarray(row) for row in rows]
    most = max(map(len, rows))
    ends = lambda row: [(0, most - len(row))] + [(0, 0)] * (row.ndim - 1)
    return np.stack([np.pad(row, ends(row)) for row in rows])

  seen = {}
  hook(model.backbone, 'maps')
  hook(model.rpn, 'proposals', lambda out: out[0])
  hook(model.roi_heads.box_predictor, 'box')
  hook(model.roi_heads.mask_predictor, 'mask')
  results = model.eval()(pixels)
  for key in ('1', '3'):
    x[f'map_{key}'] = seen['maps'][key].numpy().transpose(0, 2, 3, 1)
  numbers = [len(p) for p in seen['proposals']]
  x |= dict(num_proposals=np.array(numbers), proposal_boxes=pad(seen['proposals']))
  for part, out in zip(('logits', 'deltas'), seen['box'], strict=True):
    x[f'box_{part}_0'] = pad(out.split(numbers))
  x['num_detections'] = np.array([len(r['scores']) for r in results])
  for key in ('boxes', 'scores', 'labels'):
    name = 'classes' if key == 'labels' else key
    x[name] = pad([r[key] for r in results])
  parts = seen['mask'].sigmoid().split(x['num_detections'].tolist())
  x['mask_probs'] = np.stack(
    [part[range(4), r['labels'][:4]] for part, r in zip(parts, results, strict=True)]
  )

  targets = [
    dict(boxes=b, labels=k + 1, masks=m)
    for b, k, m in zip(*map(torch.from_numpy, (boxes, labels, masks)), strict=True)
  ]
  chosen = model.roi_heads.select_training_samples

  def select(proposals, targets):
    out = chosen(proposals, targets)
    x['train_num_proposals'] = np.array([len(p) for p in proposals])
    x['roi_boxes'], x['roi_classes'] = pad(out[0]), pad(out[2])
    return out

  model.roi_heads.select_training_samples = select
  with torch.enable_grad():
    losses = model.train()(pixels, targets)
    total = sum(losses.values())
    total.backward()
  n = x['roi_boxes'].shape[1]
  for part, out in zip(('logits', 'deltas'), seen['box'], strict=True):
    x[f'train_box_{part}_0'] = out.detach().numpy().reshape(2, n, -1)
  x['loss_names'] = np.array(sorted(losses))
  x['losses'] = np.array([losses[name].detach() for name in sorted(losses)])
  x['loss_total'] = total.detach().numpy()
  grads = {k: p.grad.norm().item() for k, p in model.named_parameters()}
  x['grad_names'] = np.array(list(grads))
  x['grad_norms'] = np.array(list(grads.values()), np.float32)
  np.savez_compressed(FOLDER / f'{NAME}.expected.npz', **x)


if __name__ == '__main__':
  main()
