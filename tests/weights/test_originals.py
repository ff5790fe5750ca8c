"""Files of the authors of ViTs; their outputs are in test_goldens.py."""

import argparse
import collections
import json
import pickle
import re
import shutil
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import vit_jax
from tests.support import GOLDEN, naming
from tests.support.goldens import TOLD, arrays_of, path_of
from vit_jax import weights
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.weights import readers
from vit_jax.weights.families import vit_originals

# Models of timm -> (their authors' file, what timm's conversion renamed, back).
RENAMED = {
  'deit3_timm': ('deit_3_small_224_1k.pth', [(r'ls(\d)\.gamma', r'gamma_\1')]),
  'deit_distilled_timm': ('deit_tiny_distilled_patch16_224-b40b3cf7.pth', []),
  'aimv2_timm': (
    'aimv2.pth',
    [
      (r'patch_embed', 'preprocessor.patchifier'),
      (r'^pos_embed', 'preprocessor.pos_embed'),
      (r'^norm', 'trunk.post_trunk_norm'),
      (r'^blocks', 'trunk.blocks'),
      (r'\.norm(\d)', r'.norm_\1'),
      (r'fc1_x', 'fc3'),
      (r'fc1_g', 'fc1'),
    ],
  ),
  'eva02_tiny_timm': (
    'eva02_Ti_pt_in21k_ft_in1k_p14.pt',
    [(r'mlp\.fc1', 'mlp.w12'), (r'mlp\.fc2', 'mlp.w3')],
  ),
  'eva02_postnorm_timm': ('EVA02_CLIP_E_psz14_s4B.pt', [('^', 'visual.')]),
}


def as_the_authors(name, side=16):
  """Returns a timm golden's arrays under the authors' names.

  `side`: of the grid to which EVA's tables of positions are scaled.
  """
  arrays = {}
  for key, x in arrays_of(name).items():
    for regex, new in RENAMED[name][1]:
      key = re.sub(regex, new, key)
    arrays[key] = x
  if 'tiny_timm' in name:  # the authors keep the tables of a grid of 4 x 4
    rows = np.arange(16)[:, None] // 4 * side / 4 * 10_000 ** -(np.arange(4) / 4)
    arrays['rope.freqs_cos'] = np.cos(np.repeat(rows, 4, axis=1))
  return arrays


@pytest.mark.parametrize('name', RENAMED)
def test_what_timm_renamed(name, tmp_path, monkeypatch):
  file, arrays = RENAMED[name][0], as_the_authors(name)
  expected = np.load(GOLDEN / f'{name}.expected.npz')
  monkeypatch.setattr(readers, 'read', lambda path: readers.Raw(arrays, {}))
  (tmp_path / file).touch()
  heads = 3 if 'postnorm' in name else 2
  loaded = vit_jax.load(str(tmp_path / file), num_heads=heads)
  assert loaded.format == 'authors'
  logits, out = jax.jit(loaded.model.apply)(loaded.variables, expected['image'])
  np.testing.assert_allclose(out['tokens'], expected['embed'], rtol=0, atol=2e-5)
  np.testing.assert_allclose(out['block01'], expected['block_2'], rtol=0, atol=2e-5)
  last = 'logits' if 'logits' in expected else 'pre_logits'
  result = logits if last == 'logits' else out[last]
  np.testing.assert_allclose(result, expected[last], rtol=0, atol=1e-5)


# Apple's names of AIMv2 for those of transformers.
APPLE = (
  (r'^vision_model\.', 'image_encoder.'),
  (r'^text_model\.', 'text_encoder.'),
  (r'^visual_projection', 'image_projector'),
  (r'^text_projection', 'text_projector'),
  (r'^logit_scale', 'log_logit_scale'),
  (r'embeddings\.patch_embed', 'preprocessor.patchifier.proj'),
  (r'embeddings\.rms_norm', 'preprocessor.patchifier.norm'),
  (r'embeddings\.token_embedding', 'preprocessor.text_embedding'),
  (r'^text(.*)embeddings\.position.*', r'text\1preprocessor.positional_embedding'),
  (r'embeddings\.position.*', 'preprocessor.pos_embed'),
  (r'encoder\.layers', 'trunk.blocks'),
  (r'rms_norm(\d)', r'norm_\1'),
  (r'rms_norm', 'trunk.post_trunk_norm'),
  (r'attention\.out_proj', 'attn.proj'),
  (r'attention\.', 'attn.'),
  (r'ffn\.gate_proj', 'mlp.fc1'),
  (r'ffn\.up_proj', 'mlp.fc3'),
  (r'ffn\.down_proj', 'mlp.fc2'),
  (r'head\.(\w)_proj', r'head.\1'),
  (r'head\.output_proj', 'head.linear'),
)


@pytest.mark.parametrize('name', ['aimv2_native_hf', 'aimv2_lit_hf'])
def test_aimv2_under_apples_names(name, tmp_path, monkeypatch):
  arrays, config = {}, json.loads((path_of(name) / 'config.json').read_text())
  for key, x in arrays_of(name).items():
    for regex, new in APPLE:
      key = re.sub(regex, new, key)
    arrays[key] = x[None] if key.endswith('pos_embed') else x
  for key in [key for key in arrays if key.endswith('attn.q_proj.weight')]:
    qkv = [arrays.pop(key.replace('.q_', f'.{part}_')) for part in 'qkv']
    arrays[key.replace('q_proj', 'qkv')] = np.concatenate(qkv)
  config = config if 'lit' in name else {}
  expected = vit_jax.load(path_of(name))
  monkeypatch.setattr(readers, 'read', lambda path: readers.Raw(arrays, config))
  (tmp_path / 'aimv2.pth').touch()
  loaded = vit_jax.load(str(tmp_path / 'aimv2.pth'), num_heads=2, image_size=32)
  assert (loaded.format, loaded.model) == ('authors', expected.model)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)
  if 'lit' in name:
    assert loaded.towers.text == expected.towers.text
    jax.tree.map(np.testing.assert_array_equal, loaded.beside, expected.beside)


def test_a_perception_encoder_without_pooling(tmp_path, monkeypatch):
  # As those for languages and for dense tasks, whose files have no final norm either.
  whole = vit_jax.load(path_of('pe_core_original'), **TOLD['pe_core_original'])
  arrays = {
    name.removeprefix('visual.'): x
    for name, x in arrays_of('pe_core_original').items()
    if re.match(r'visual\.(?!attn_pool|ln_post|proj)', name)
  }
  monkeypatch.setattr(readers, 'read', lambda path: readers.Raw(arrays, {}))
  path = tmp_path / 'PE-Spatial-B16-512.pt'
  path.touch()
  loaded = vit_jax.load(str(path), num_heads=2)
  image = np.load(GOLDEN / 'pe_core_original.expected.npz')['image']
  _, out = jax.jit(loaded.model.apply)(loaded.variables, image)
  _, expected = jax.jit(whole.model.apply)(whole.variables, image)
  np.testing.assert_array_equal(out['encoded'], expected['block01'])


# -- published names ------------------------------------------------------------------


@pytest.mark.parametrize(
  ('name', 'fields'),
  [
    ('dinov2_vitg14_reg4_pretrain.pth', {'num_heads': 24}),
    ('ViT-L-14-336px.pt', {'num_heads': 16, 'act': 'quick_gelu'}),
    ('mae_pretrain_vit_huge.pth', {'num_heads': 16}),
    ('deit_3_medium_224_21k.pth', {'num_heads': 8, 'posemb_tokens': 'patches'}),
    ('EVA02_CLIP_E_psz14_s4B.pt', {'num_heads': 16, 'block': 'post'}),
    ('eva02_Ti_pt_in21k_p14.pt', {'num_heads': 3}),
    ('IN22K-vit.g.16-600e.pth.tar', {'num_heads': 16}),
    ('PE-Core-T16-384.pt', {'num_heads': 3}),
    ('aimv2-1B-patch14-224', {'num_heads': 16}),
    ('aimv2-large-patch14-native', {'num_heads': 8}),
    ('dinov3_vit7b16_pretrain_sat493m-a6675841.pth', {}),
    ('mine.pth', {}),
  ],
)
def test_a_published_name_tells_what_arrays_do_not(name, fields):
  told, images = vit_originals.look_up(name)
  assert told == fields
  assert ('mean' in images) == ('sat493m' in name)


def test_a_file_without_such_a_name_is_asked_for(tmp_path, monkeypatch):
  raw = readers.Raw(arrays_of('clip_openai'), {})
  monkeypatch.setattr(readers, 'read', lambda path: raw)
  for name in ('ViT-B-32.pt', 'mine.pth'):
    (tmp_path / name).touch()
  source = weights.read(str(tmp_path / 'ViT-B-32.pt'), num_heads=1)
  assert source.fields['act'] == 'quick_gelu'
  assert '-1.79' in source.pp  # CLIP's levels
  hint = "pass variant='ViT-B-32-quickgelu'"
  with pytest.raises(UserError, match=naming('num_heads', 'act', hint)):
    weights.read(str(tmp_path / 'mine.pth'))
  with pytest.raises(UserError, match=naming('pass another num_heads', 'num_heads=7')):
    weights.read(str(tmp_path / 'ViT-B-32.pt'), num_heads=7)


@pytest.mark.parametrize(
  ('folder', 'options', 'act'),
  [
    ('ViT-B-8', {}, 'gelu_erf'),
    ('ViT-B-8-quickgelu', {}, 'quick_gelu'),
    ('models--laion--CLIP-ViT-B-8-laion2B-s34B/snapshots/1a', {}, 'gelu_erf'),
    ('mine', {'variant': 'ViT-B-8'}, 'gelu_erf'),
  ],
)
def test_a_bare_file_of_open_clip_has_the_name_of_its_folder(
  tmp_path, monkeypatch, folder, options, act
):
  monkeypatch.setitem(vit.VARIANTS, 'B', (32, 2, 128, 2))
  (tmp_path / folder).mkdir(parents=True)
  file = tmp_path / folder / 'open_clip_model.safetensors'
  shutil.copy(path_of('clip_open_clip') / file.name, file)
  expected = weights.read(path_of('clip_open_clip'))
  source = weights.read(file, **options)
  same = {'act': act} | {k: x for k, x in expected.fields.items() if k != 'act'}
  assert source.fields.items() >= same.items()
  for key in ('format', 'image_size', 'pp', 'resize'):
    assert getattr(source, key) == getattr(expected, key)
  for name, x in expected.flat.items():
    np.testing.assert_array_equal(source.flat[name], x)


def test_a_folder_named_after_another_open_clip(tmp_path):
  (tmp_path / 'ViT-L-14').mkdir()
  shutil.copy(
    path_of('clip_open_clip') / 'open_clip_model.safetensors', tmp_path / 'ViT-L-14'
  )
  with pytest.raises(UserError, match=naming('shapes', (32,), (1024,))):
    vit_jax.load(tmp_path / 'ViT-L-14' / 'open_clip_model.safetensors')


# -- written --------------------------------------------------------------------------


@pytest.mark.parametrize(
  'name',
  ['dinov2_original', 'dinov2_reg4_swiglu_original', 'dinov3_original']
  + ['dinov3_untied_original', 'clip_openai'],
)
def test_the_authors_arrays_are_written_again(name, tmp_path):
  source = weights.read(path_of(name), **TOLD.get(name, {}))
  weights.write(source, tmp_path / 'new', 'authors')
  theirs, ours = arrays_of(name), load_file(tmp_path / 'new/model.safetensors')
  # The mask token and the norm of local crops are for training alone, and the masked
  # biases of keys are written as zeros.
  missing = {
    n for n in theirs.keys() - ours.keys() if not n.startswith('local_cls_norm')
  }
  assert all(name == 'clip_openai' and not n.startswith('visual') for n in missing)
  for key, x in ours.items():
    expected = np.asarray(theirs[key], np.float32)
    if key.endswith('qkv.bias') and f'{key}_mask' in theirs:
      expected = expected * theirs[f'{key}_mask']
    if key != 'mask_token':
      np.testing.assert_array_equal(x, expected, err_msg=key)
  again = weights.read(str(tmp_path / 'new'))
  assert again.fields == source.fields
  assert again.pp == source.pp


@pytest.mark.parametrize('name', ['clip_open_clip', 'clip_resnet_open_clip'])
def test_open_clips_two_towers_are_written_again(name, tmp_path):
  weights.write(weights.read(path_of(name)), tmp_path / 'a', 'open_clip')
  theirs = load_file(next(path_of(name).glob('*.safetensors')))
  ours = load_file(tmp_path / 'a/model.safetensors')
  assert ours.keys() == theirs.keys()
  assert all(np.array_equal(ours[name], x) for name, x in theirs.items())
  configs = [path / 'open_clip_config.json' for path in (path_of(name), tmp_path / 'a')]
  theirs, ours = (json.loads(path.read_text()) for path in configs)
  for key, value in theirs['preprocess_cfg'].items():
    same = pytest.approx(value, abs=1e-7) if key in ('mean', 'std') else value
    assert ours['preprocess_cfg'][key] == same
  for key in ('vision_cfg', 'text_cfg'):
    assert ours['model_cfg'][key].items() >= theirs['model_cfg'][key].items()
  assert ours['model_cfg']['quick_gelu'] == theirs['model_cfg'].get('quick_gelu', False)


# -- CLIP's ResNets and ConvNeXts -------------------------------------------------------


def test_the_name_of_openais_resnets_gives_the_activation_of_texts(
  tmp_path, monkeypatch
):
  raw = readers.Raw(arrays_of('clip_resnet_open_clip'), {})
  expected = vit_jax.load(path_of('clip_resnet_open_clip'))
  monkeypatch.setattr(readers, 'read', lambda path: raw)
  # open_clip calls the model without quick_gelu 'RN50', too.
  for name in ('RN50.pt', 'RN50', 'mine.pt'):
    (tmp_path / name).touch()
    loaded = vit_jax.load(str(tmp_path / name))
    assert (loaded.model, loaded.pp) == (expected.model, expected.pp)
    assert loaded.image_size == (64, 64)
    if name == 'RN50.pt':
      assert loaded.towers == expected.towers
    else:
      assert 'no texts: neither arrays nor name give the activation' in loaded.report


def test_positions_of_openais_resnets_that_are_no_square_give_no_image_size(
  tmp_path, monkeypatch
):
  arrays = arrays_of('clip_resnet_open_clip')
  name = 'visual.attnpool.positional_embedding'
  arrays[name] = np.concatenate([arrays[name], arrays[name][:2]])  # 1 + 6 rows
  monkeypatch.setattr(readers, 'read', lambda path: readers.Raw(arrays, {}))
  (tmp_path / 'RN50.pt').touch()
  assert weights.read(str(tmp_path / 'RN50.pt')).image_size is None


def test_a_convnext_of_clip_is_written_for_timm_with_a_bias_of_zeros(tmp_path):
  source = weights.read(path_of('clip_convnext_open_clip'))
  assert (source.fields['norm_eps'], source.fields['body_norm_eps']) == (1e-5, 1e-5)
  weights.write(source, tmp_path / 'a', 'timm')
  again = weights.read(tmp_path / 'a')
  assert again.fields == source.fields | dict(head_bias=True)
  assert not again.flat.pop('head/bias').any()
  for name, x in source.flat.items():
    np.testing.assert_array_equal(again.flat[name], x, err_msg=name)


def test_a_projection_of_one_layer_is_the_head(monkeypatch):
  arrays = arrays_of('clip_convnext_open_clip')
  last = arrays.pop('visual.head.mlp.fc2.weight')
  last = last[:, :32]
  for name in ('visual.head.mlp.fc1.weight', 'visual.head.mlp.fc1.bias'):
    del arrays[name]
  raw = readers.read(path_of('clip_convnext_open_clip'))
  raw = readers.Raw(arrays | {'visual.head.proj.weight': last}, raw.config)
  monkeypatch.setattr(readers, 'read', lambda path: raw)
  source = weights.read(path_of('clip_convnext_open_clip'))
  assert source.fields['representation_size'] is None
  np.testing.assert_array_equal(source.flat['head/kernel'], last.T)


@pytest.mark.parametrize(
  ('name', 'change', 'words'),
  [
    ('clip_resnet_timm', {'architecture': 'resnet51q'}, ('resnet51q', 'timm')),
    ('clip_resnet_timm', {'global_pool': ''}, ("global_pool=''", 'token')),
    ('clip_resnet_timm', {'model_args': {'aa_layer': 'blur'}}, ('aa_layer',)),
    ('clip_resnet_open_clip', {'head_width': 32}, ('head_width=32', '64')),
    ('clip_resnet_open_clip', {'attentional_pool': True}, ('attentional_pool',)),
    ('clip_convnext_open_clip', {'timm_pool': 'rot_attn'}, ('rot_attn', 'avg')),
    ('clip_convnext_open_clip', {'timm_model_name': ''}, ('timm_model_name',)),
    ('clip_convnext_open_clip', {'attentional_pool': True}, ('attentional_pool',)),
  ],
)
def test_towers_that_compute_something_else_are_refused(
  name, change, words, monkeypatch
):
  raw = readers.read(path_of(name))
  if 'timm' in name:
    raw = raw._replace(config=raw.config | change)
  else:
    raw.config['open_clip']['model_cfg']['vision_cfg'] |= change
  monkeypatch.setattr(readers, 'read', lambda path: raw)
  with pytest.raises(UserError, match=naming(*words)):
    weights.read(path_of(name))


@pytest.mark.peer
@pytest.mark.filterwarnings('default')
@pytest.mark.parametrize(
  ('name', 'fields'),
  [
    ('clip_open_clip', {}),
    ('clip_openai', TOLD['clip_openai']),
    ('clip_hf', {}),
    ('clip_resnet_open_clip', {}),
  ],
)
def test_open_clip_reads_what_is_written(name, fields, tmp_path):
  torch = pytest.importorskip('torch', reason='torch is not installed')
  open_clip = pytest.importorskip('open_clip', reason='open_clip is not installed')
  weights.write(weights.read(path_of(name), **fields), tmp_path / 'a', 'open_clip')
  model = open_clip.create_model(f'local-dir:{tmp_path / "a"}').eval()
  expected = dict(np.load(GOLDEN / f'{name}.expected.npz'))
  images = torch.from_numpy(expected['image'].transpose(0, 3, 1, 2).copy()).float()
  with torch.no_grad():
    image = model.encode_image(images).numpy()
    text = model.encode_text(torch.from_numpy(expected['input_ids'])).numpy()
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  computed = {'image_features': image, 'text_features': text}
  computed |= {'image_embeds': unit(image), 'text_embeds': unit(text)}
  for key in computed.keys() & expected.keys():
    np.testing.assert_allclose(computed[key], expected[key], rtol=0, atol=1e-5)


def with_another_mask():
  arrays = arrays_of('dinov3_original')
  mask = next(name for name in arrays if name.endswith('qkv.bias_mask'))
  return arrays | {mask: np.ones_like(arrays[mask])}


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (with_another_mask, ('hides other biases', 'keys')),
    (lambda: as_the_authors('eva02_tiny_timm', side=4), ('rotary', '16 x 16')),
  ],
)
def test_arrays_that_no_field_expresses_are_refused(make, words, tmp_path, monkeypatch):
  monkeypatch.setattr(readers, 'read', lambda path: readers.Raw(make(), {}))
  (tmp_path / 'a.pth').touch()
  with pytest.raises(UserError, match=naming(*words)):
    weights.read(str(tmp_path / 'a.pth'), num_heads=2)


# -- files of PyTorch -----------------------------------------------------------------


@pytest.mark.parametrize(
  'wrap',
  [
    lambda arrays: arrays,
    lambda arrays: {'model': arrays, 'epoch': 3},
    lambda arrays: {'teacher': {f'backbone.{n}': x for n, x in arrays.items()}},
    lambda arrays: {'state_dict': {f'module.{n}': x for n, x in arrays.items()}},
    lambda arrays: {re.sub('^blocks', 'blocks.0', n): x for n, x in arrays.items()},
  ],
)
def test_files_of_pytorch_are_unwrapped(wrap, tmp_path):
  path = tmp_path / 'teacher_checkpoint.pth'
  path.write_bytes(pickle.dumps(wrap(arrays_of('dinov2_original'))))
  source = weights.read(str(path), num_heads=2)
  expected = weights.read(path_of('dinov2_original'), num_heads=2)
  assert source.fields == expected.fields
  assert all(np.array_equal(x, expected.flat[n]) for n, x in source.flat.items())


def test_a_folder_with_parts_by_pytorch(tmp_path):
  shutil.copy(GOLDEN / 'vit_hf' / 'config.json', tmp_path)
  where, parts = {}, collections.defaultdict(dict)
  for k, (name, x) in enumerate(arrays_of('vit_hf').items()):
    where[name] = part = f'pytorch_model-{k % 2}.bin'
    parts[part][name] = x
  for part, arrays in parts.items():
    (tmp_path / part).write_bytes(pickle.dumps(arrays))
  index = tmp_path / 'pytorch_model.bin.index.json'
  index.write_text(json.dumps({'weight_map': where}))
  source, expected = weights.read(str(tmp_path)), weights.read(path_of('vit_hf'))
  assert source.fields == expected.fields
  assert all(np.array_equal(x, expected.flat[n]) for n, x in source.flat.items())


# The arrays of golden/zipped.pth and golden/legacy.pth, which PyTorch 2.13 wrote.
_GRID = np.arange(24, dtype=np.float32).reshape(4, 6)
SAVED = {
  'whole': _GRID,
  'row': _GRID[2],  # These four share a storage.
  'transposed': _GRID.T,
  'strided': _GRID[1::2, ::3],
  'parameter': _GRID[:2],
  'half': _GRID.astype(np.float16),
  'bfloat16': _GRID.T.astype(jnp.bfloat16),
  'count': np.int64(7),
  'mask': _GRID > 11,
  'indices': np.arange(6)[None],
  'expanded': np.ones((3, 2), np.float32),
  'bytes': np.arange(5, dtype=np.uint8),
}


@pytest.mark.parametrize('name', ['zipped', 'legacy'])
def test_files_of_pytorch_are_read_without_it(name, monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)
  arrays = readers.read(GOLDEN / f'{name}.pth').arrays
  assert arrays.keys() == SAVED.keys()
  for key, expected in SAVED.items():
    array = np.asarray(arrays[key])
    assert array.dtype == expected.dtype, key
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
  ('old', 'new', 'why'),
  [
    # Shape and strides of 'whole'.
    (b'K\x04K\x06\x86', b'K\x05K\x06\x86', 'exceeds'),
    (b'K\x06K\x01\x86', b'K\x07K\x01\x86', 'exceeds'),
    (b'K\x06K\x01\x86', b'J\xff\xff\xff\xffK\x01\x86', 'negative'),
    (b'K\x03K\x02\x86', b'J\0\0\0\x7fJ\0\0\0\x7f\x86', 'bytes'),
    (b'X\x05\0\0\0whole', b'r\xff\xff\xff\x0fX\x05\0\0\0whole', 'index'),
    (b'FloatStorage', b'FloatStoragf', 'type'),
    (b'little_endianq\x02\x88', b'little_endianq\x02\x89', 'endian'),
  ],
)
def test_tensors_that_lie_are_refused(old, new, why, tmp_path):
  data = (GOLDEN / 'legacy.pth').read_bytes()
  assert old in data
  path = tmp_path / 'a.pth'
  path.write_bytes(data.replace(old, new, 1))
  with pytest.raises(UserError, match=naming(str(path), why)):
    readers.read(path)


@pytest.mark.parametrize('name', ['zipped', 'legacy'])
def test_a_damaged_file_of_pytorch_is_refused(name, tmp_path):
  data = (GOLDEN / f'{name}.pth').read_bytes()
  path = tmp_path / 'a.pth'
  for end in range(0, len(data) - 1, 97):
    path.write_bytes(data[:end])
    with pytest.raises(UserError, match=naming(str(path))):
      readers.read(path)
  if name == 'zipped':
    at = data.index(np.arange(24, dtype=np.float32).tobytes())
    path.write_bytes(data[: at + 8] + b'\1' + data[at + 9 :])
    with pytest.raises(UserError, match=naming(str(path), 'CRC-32')):
      np.asarray(readers.read(path).arrays['whole'])


def test_a_torchscript_archive_says_how_to_save_its_arrays(tmp_path):
  with zipfile.ZipFile(tmp_path / 'ViT-B-32.pt', 'w') as archive:
    archive.writestr('ViT-B-32/constants.pkl', b'')
  with pytest.raises(UserError, match=naming('torch.jit.load', 'state_dict')):
    weights.read(str(tmp_path / 'ViT-B-32.pt'))


@pytest.mark.peer
@pytest.mark.filterwarnings('default')  # PyTorch's
@pytest.mark.parametrize('zipped', [True, False])
def test_pytorch_itself(zipped, tmp_path):
  torch = pytest.importorskip('torch', reason='torch is not installed')
  arrays = arrays_of('dinov2_original')
  tensors = {n: torch.from_numpy(x).to(torch.bfloat16) for n, x in arrays.items()}
  tensors['view'] = torch.arange(60).to(torch.uint16).reshape(3, 4, 5)[::2, 1].T
  tensors['parameter'] = torch.nn.Parameter(torch.arange(6.0).expand(2, 6))
  arrays['view'] = tensors['view'].numpy()
  arrays['parameter'] = tensors['parameter'].detach().numpy()
  saved = {'model': tensors, 'args': argparse.Namespace(lr=1e-3), 'epoch': 3}
  path = tmp_path / 'dinov2.pth'
  options = {'_use_new_zipfile_serialization': zipped}
  torch.save(saved, path, **options)
  loaded = readers.read(path).arrays
  assert loaded.keys() == arrays.keys()
  for name, x in arrays.items():
    x = x if name in ('view', 'parameter') else x.astype(jnp.bfloat16)
    assert loaded[name].dtype == x.dtype
    np.testing.assert_array_equal(loaded[name], x)
  torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / 'ViT-B-32.pt')
  with pytest.raises(UserError, match=naming('torch.jit.load', 'state_dict')):
    readers.read(tmp_path / 'ViT-B-32.pt')
  numbers = torch.zeros(3, dtype=torch.complex64)
  for name, x, words in (
    ('sparse', torch.eye(3).to_sparse(), ("'sparse'", 'dense')),
    ('meta', torch.zeros(3, device='meta'), ("'meta'", 'dense')),
    ('float8', torch.zeros(3).to(torch.float8_e4m3fn), ('float8_e4m3fn',)),
    ('conjugate', numbers.conj(), ('conjugate', 'clone')),
    ('negative', numbers.conj().imag, ('negative', 'clone')),
  ):
    torch.save({'model': {'a': torch.ones(1), name: x}}, path, **options)
    with pytest.raises(UserError, match=naming('dinov2.pth', *words)):
      readers.read(path)
  torch.save({'model': pytest.approx(3)}, path)
  with pytest.raises(UserError, match=naming('dinov2.pth', 'state_dict')):
    readers.read(path)
