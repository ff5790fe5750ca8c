"""transformers' side of `detection.py`, in a Python that has torch, transformers and scipy.

Answers JSON lines from standard input, like `vit_jax/tools/bench/torch_worker.py`, whose
server it loads by path, since vit_jax is not installed there.
"""

import contextlib
import pathlib
import runpy
import time

_BENCH = pathlib.Path(__file__).resolve().parents[1] / 'vit_jax' / 'tools' / 'bench'
_TORCH_WORKER = runpy.run_path(str(_BENCH / 'torch_worker.py'))


def load():
  """Returns the modules torch and transformers."""
  import torch

  with _TORCH_WORKER['lenient_operators'](torch), contextlib.suppress(ImportError):
    import torchvision  # noqa: F401  transformers imports it later, without our leniency
  import transformers

  return torch, transformers


class Detr:
  """DetrForObjectDetection with random weights, its batch and its optimizer."""

  def __init__(self, spec: dict):
    """Builds it.

    Args:
      spec: variant, 'R50' or 'R101'; batch; size, [H, W]; objects of an image; classes;
        threads.
    """
    torch, transformers = load()
    torch.manual_seed(0)
    torch.set_num_threads(spec['threads'])
    self._torch = torch
    layers = {'R50': [3, 4, 6, 3], 'R101': [3, 4, 23, 3]}[spec['variant']]
    config = transformers.DetrConfig(
      use_timm_backbone=False,
      backbone=None,
      use_pretrained_backbone=False,
      backbone_config=transformers.ResNetConfig(depths=layers, out_features=['stage4']),
      num_labels=spec['classes'],
      auxiliary_loss=True,
      dropout=0.1,
      attention_dropout=0.1,
    )
    self._model = transformers.DetrForObjectDetection(config).train()
    for name, p in self._model.named_parameters():
      if 'embedder' in name or 'stages.0.' in name:  # as the reference code
        p.requires_grad_(False)
    trained = [p for p in self._model.parameters() if p.requires_grad]
    self._trained = trained
    self._adamw = torch.optim.AdamW(trained, lr=1e-4, weight_decay=1e-4, fused=True)
    B, objects = spec['batch'], spec['objects']
    self._images = torch.rand((B, 3, *spec['size'])) * 2 - 1
    self._mask = torch.ones((B, *spec['size']), dtype=torch.long)
    self._labels = [
      {
        'class_labels': torch.randint(0, spec['classes'], (objects,)),
        'boxes': torch.rand((objects, 4)) * 0.3 + 0.3,
      }
      for _ in range(B)
    ]
    self.about = {'params': sum(p.numel() for p in self._model.parameters())}

  @staticmethod
  def check(spec: None) -> dict[str, str]:
    """Returns versions; ImportError without torch or transformers."""
    torch, transformers = load()
    return {'torch': torch.__version__, 'transformers': transformers.__version__}

  def turn(self, steps: int) -> dict:
    """Runs so many steps; returns 'wall' and 'cpu' seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
      self._adamw.zero_grad(set_to_none=True)
      out = self._model(self._images, pixel_mask=self._mask, labels=self._labels)
      out.loss.backward()
      self._torch.nn.utils.clip_grad_norm_(self._trained, 0.1)
      self._adamw.step()
    return {'wall': time.perf_counter() - wall, 'cpu': time.process_time() - cpu}


if __name__ == '__main__':
  _TORCH_WORKER['serve'](_TORCH_WORKER['Server'](Detr))
