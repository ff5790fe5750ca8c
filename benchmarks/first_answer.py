"""The first answer of a new process: `vit_jax predict` of one JPEG beside a script of timm.

  .venv-peer/bin/python benchmarks/first_answer.py [--model vit_base_patch16_224]
    [--rounds 5]

Both load the same random weights, which timm saved, and print the five most probable classes.
All of a process counts: imports, loading, compilation, decoding. A first run of each fills
the caches.
"""

import pathlib
import subprocess
import sys
import tempfile

import input_pipeline
import turns

from vit_jax import cli
from vit_jax.tools import bench

THEIRS = """
import sys, timm, torch
from PIL import Image
model = timm.create_model(f'local-dir:{sys.argv[1]}', pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
with torch.inference_mode():
  logits = model(transform(Image.open(sys.argv[2]).convert('RGB'))[None])
top = logits.softmax(-1)[0].topk(5)
print(*zip(top.values.tolist(), top.indices.tolist()), sep='\\n')
"""


def main(argv: list[str]) -> int:
  parser = cli.Parser('first_answer.py', description=__doc__.split('\n')[0])
  parser.add_argument('--model', default='vit_base_patch16_224', help="timm's")
  parser.add_argument('--rounds', type=cli.positive, default=5)
  args = parser.parse_args(argv)
  import timm
  import torch

  torch.manual_seed(0)
  with tempfile.TemporaryDirectory() as place:
    place = pathlib.Path(place)
    timm.models.save_for_hf(timm.create_model(args.model), place / 'weights')
    input_pipeline.make_images(place / 'photos', 1)
    (photo,) = map(str, place.rglob('*.jpg'))
    files = [str(place / 'weights'), photo]
    ours = [sys.executable, '-m', 'vit_jax', 'predict', *files]
    theirs = [sys.executable, '-c', THEIRS, *files]
    run = lambda command: lambda: subprocess.run(command, check=True)
    sides = (turns.timed(run(x), input_pipeline.cpu_seconds) for x in (ours, theirs))
    timing = turns.compare(*sides, args.rounds)
  print(bench.this_machine())
  print(
    f'{args.model}: {timing["ours"]:.3g} s, timm {timing["theirs"]:.3g} s, '
    f'{turns.text(timing)}'
  )
  return 0


if __name__ == '__main__':
  sys.exit(cli.run(main))
