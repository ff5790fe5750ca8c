"""torchvision's side of `input_pipeline.py`, in a Python that has torch and torchvision.

Answers JSON lines on standard input, as `vit_jax/tools/bench/torch_worker.py`, whose
server it takes by path: nothing of vit_jax is installed there.
"""

import pathlib
import resource
import runpy
import time

_BENCH = pathlib.Path(__file__).resolve().parents[1] / 'vit_jax' / 'tools' / 'bench'
_TORCH_WORKER = runpy.run_path(str(_BENCH / 'torch_worker.py'))

# As `inception_crop(224)|flip_lr` and `resize_small(256)|central_crop(224)`: crops of 5
# to 100 % of the area, bilinear; uint8 tensors, to be scaled on the device.
TRANSFORMS = {
  'train': lambda t: [
    t.RandomResizedCrop(224, scale=(0.05, 1.0)),
    t.RandomHorizontalFlip(),
    t.PILToTensor(),
  ],
  'evaluate': lambda t: [t.Resize(256), t.CenterCrop(224), t.PILToTensor()],
}


def load():
  """Returns the modules torch and torchvision."""
  import torch

  with _TORCH_WORKER['lenient_operators'](torch):
    import torchvision
  return torch, torchvision


class Loader:
  """A DataLoader over a folder of images."""

  def __init__(self, spec: dict):
    """Opens it.

    Args:
      spec: folder, transform (a key of TRANSFORMS), batch and workers.
    """
    torch, torchvision = load()
    self._torch, self._spec = torch, spec
    transforms = torchvision.transforms
    transform = transforms.Compose(TRANSFORMS[spec['transform']](transforms))
    self._images = torchvision.datasets.ImageFolder(spec['folder'], transform)
    self.about = {'transform': ' '.join(str(transform).split())}

  @staticmethod
  def check(spec: None) -> dict[str, str]:
    """Returns versions; ImportError without torch or torchvision."""
    torch, torchvision = load()
    return {'torch': torch.__version__, 'torchvision': torchvision.__version__}

  def turn(self, batches: int) -> dict:
    """Reads so many batches; returns 'wall' and 'cpu' seconds, the workers' included."""
    size = self._spec['batch']
    data = self._torch.utils.data
    epochs = -(-batches * size // len(self._images))
    images = data.ConcatDataset([self._images] * epochs)
    sampler = data.RandomSampler(images, num_samples=batches * size)
    wall, cpu = time.perf_counter(), self._cpu()
    loader = data.DataLoader(
      images, size, sampler=sampler, num_workers=self._spec['workers']
    )
    count = sum(len(labels) for _, labels in loader)
    assert count == batches * size, count
    return {'wall': time.perf_counter() - wall, 'cpu': self._cpu() - cpu}

  def _cpu(self) -> float:
    """Returns the processor time of this process and of its workers that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == '__main__':
  _TORCH_WORKER['serve'](_TORCH_WORKER['Server'](Loader))
