"""The formats: spellings of names, facts in configs, round trips, what is refused."""

import dataclasses
import functools
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import vit_jax
from tests.support import naming
from tests.support.goldens import GOLDENS, TOLD, arrays_of, check, path_of
from vit_jax import models, trees, weights
from vit_jax.data.single_image import SingleImage
from vit_jax.errors import UserError
from vit_jax.weights import adapt, export, formats, pipelines, readers
from vit_jax.weights.families import bit
from vit_jax.weights.source import Source


def assert_reads_alike(source, name, **fields):
  """Asserts that `source` holds the model and the parameters of a golden."""
  ours, theirs = weights.read(source), weights.read(path_of(name))
  assert ours.fields == theirs.fields | fields
  assert ours.flat.keys() == theirs.flat.keys()
  for key, x in theirs.flat.items():
    np.testing.assert_array_equal(ours.flat[key], x, err_msg=key)
  return ours


def assert_holds(folder, name):
  """Asserts that a folder has the arrays of a golden, bit for bit."""
  arrays, expected = load_file(folder / 'model.safetensors'), arrays_of(name)
  assert arrays.keys() == expected.keys()
  for key, x in expected.items():
    np.testing.assert_array_equal(arrays[key], x, err_msg=key)


def folder_of(tmp_path, name, change=lambda config: None, rename=None):
  """A copy of a golden folder with its config changed, and its arrays renamed."""
  folder = shutil.copytree(path_of(name), tmp_path / 'folder')
  config = json.loads((folder / 'config.json').read_text())
  change(config)
  (folder / 'config.json').write_text(json.dumps(config))
  if rename:
    arrays = {rename(n): x for n, x in arrays_of(name).items()}
    save_file(arrays, folder / 'model.safetensors')
  return folder


def renaming(*changes):
  def rename(name):
    for old, new in changes:
      name = name.replace(old, new)
    return name

  return rename


# -- the same weights in other spellings ----------------------------------------------

LINEN = (
  ('MultiHeadDotProductAttention_1', 'MultiHeadDotProductAttention_0'),
  ('LayerNorm_2', 'LayerNorm_1'),
  ('MlpBlock_3', 'MlpBlock_0'),
)
SPELLINGS = {
  'Linen names': ('vit_google_token', renaming(*LINEN)),
  'params/ prefix': ('vit_google_token', lambda name: f'params/{name}'),
  'no prefix': ('vit_bigvision_map', renaming(('params/', ''))),
  'inlined MAP head': ('vit_bigvision_map', renaming(('params/MAPHead_0/', 'params/'))),
}


@pytest.mark.parametrize('spelling', SPELLINGS)
def test_spellings_of_npz_files(tmp_path, spelling):
  name, rename = SPELLINGS[spelling]
  arrays = {rename(n): x for n, x in arrays_of(name).items()}
  np.savez(tmp_path / 'a.npz', **arrays)
  assert_reads_alike(tmp_path / 'a.npz', name)


def test_an_optimizer_beside_the_parameters_is_left_out(tmp_path):
  arrays = arrays_of('vit_google_token')
  moments = {f'opt/state/param_states/{n}/grad_ema': x for n, x in arrays.items()}
  params = {f'opt/target/{n}': x for n, x in arrays.items()}
  np.savez(tmp_path / 'a.npz', **params, **moments)
  source = assert_reads_alike(tmp_path / 'a.npz', 'vit_google_token')
  assert source.unused == list(moments)


def test_bfloat16_stored_as_void(tmp_path):
  arrays = arrays_of('vit_google_token')
  arrays = {n: x.astype(ml_dtypes.bfloat16) for n, x in arrays.items()}
  np.savez(tmp_path / 'a.npz', **arrays)
  flat = weights.read(tmp_path / 'a.npz').flat
  np.testing.assert_array_equal(flat['cls'], arrays['cls'].astype(np.float32))
  assert all(x.dtype == np.float32 for x in flat.values())


# transformers 5 names its layers otherwise than files on the hub.
OLDER_VIT = (
  ('vit.layers.', 'vit.encoder.layer.'),
  ('attention.q_proj', 'attention.attention.query'),
  ('attention.k_proj', 'attention.attention.key'),
  ('attention.v_proj', 'attention.attention.value'),
  ('attention.o_proj', 'attention.output.dense'),
  ('mlp.fc1', 'intermediate.dense'),
  ('mlp.fc2', 'output.dense'),
)
TABLE = 'relative_position_bias_table'
NEWER_SWIN = (
  (f'self.{TABLE}', f'relative_position_bias.{TABLE}'),
  ('self.relative_position_index', 'relative_position_bias.relative_position_index'),
  ('self.query', 'q_proj'),
  ('self.key', 'k_proj'),
  ('self.value', 'v_proj'),
  ('attention.output.dense', 'attention.o_proj'),
  ('intermediate.dense', 'mlp.fc1'),
  ('output.dense', 'mlp.fc2'),
)


@pytest.mark.parametrize(
  ('name', 'changes'), [('vit_hf', OLDER_VIT), ('swin_hf', NEWER_SWIN)]
)
def test_names_of_transformers_before_and_since_5(tmp_path, name, changes):
  folder = folder_of(tmp_path, name, rename=renaming(*changes))
  assert_reads_alike(folder, name)


def test_names_of_swins_authors_that_timm_reads(tmp_path):
  def older(name):
    if name.startswith('layers.') and '.downsample.' in name:
      return name.replace(name[7], str(int(name[7]) - 1), 1)
    return name.replace('head.fc.', 'head.')

  folder = folder_of(tmp_path, 'swin_timm', rename=older)
  arrays = load_file(folder / 'model.safetensors')
  arrays['layers.0.blocks.1.attn_mask'] = np.zeros((16, 16, 16), np.float32)
  save_file(arrays, folder / 'model.safetensors')
  source = assert_reads_alike(folder, 'swin_timm')
  assert source.unused == ['layers.0.blocks.1.attn_mask']


def test_parts_with_an_index(tmp_path):
  folder = folder_of(tmp_path, 'vit_timm')
  (folder / 'model.safetensors').unlink()
  arrays = arrays_of('vit_timm')
  names = sorted(arrays)
  parts = {'a.safetensors': names[:20], 'b.safetensors': names[20:]}
  for part, members in parts.items():
    save_file({n: arrays[n] for n in members}, folder / part)
  index = {'weight_map': {n: part for part, ns in parts.items() for n in ns}}
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
  assert_reads_alike(folder, 'vit_timm')


def test_names_of_bit_in_tensorflow(tmp_path):
  model = models.build('bit', blocks=(1, 1), width=32, num_classes=5)
  params = model.shapes((32, 32, 3))['params']
  rng = np.random.default_rng(0)
  flat = {n: rng.normal(size=x.shape) for n, x in trees.flatten(params).items()}
  file = {}
  for name, x in flat.items():
    if 'group_norm' in name:
      name = name.replace('scale', 'gamma').replace('bias', 'beta')
      x = x.reshape(1, 1, 1, -1)
    if 'unit01/b/' in name:  # TensorFlow numbers some
      name = name.replace('standardized_conv2d', 'standardized_conv2d_1')
    file[f'resnet/{name}'] = x
  np.savez(tmp_path / 'bit.npz', **file)
  source = weights.read(tmp_path / 'bit.npz')
  assert models.build('bit', **source.fields) == model
  assert source.flat.keys() == flat.keys()
  for name, x in flat.items():
    np.testing.assert_array_equal(source.flat[name], x.astype(np.float32))


# -- round trips ----------------------------------------------------------------------

SWIN = [name for name, (_, family, _) in GOLDENS.items() if family == 'swin']


@pytest.mark.parametrize('name', SWIN)
def test_files_of_swins_come_back_bit_for_bit(tmp_path, name):
  source, out = weights.read(path_of(name)), tmp_path / 'out'
  weights.write(source, out, GOLDENS[name][0])
  assert_holds(out, name)
  assert weights.read(out).fields == source.fields
  files = (folder / 'config.json' for folder in (out, path_of(name)))
  ours, theirs = (json.loads(file.read_text()) for file in files)
  ours, theirs = (c.get('model_args', c) for c in (ours, theirs))
  for key in theirs.keys() - {'initializer_range', 'pretrained_window_sizes'}:
    assert ours[key] == theirs[key], key


@pytest.mark.parametrize(
  ('name', 'to'),
  [('swin_timm', 'hf'), ('swin_hf', 'timm'), ('swinv2_hf', 'timm')],
)
def test_files_of_one_library_for_the_other_and_back(tmp_path, name, to):
  weights.write(weights.read(path_of(name)), tmp_path / 'out', to)
  other = weights.read(tmp_path / 'out')
  borders = other.fields['borders']  # alike at this size
  assert assert_reads_alike(tmp_path / 'out', name, borders=borders).format == to
  weights.write(other, tmp_path / 'back', GOLDENS[name][0])
  assert_holds(tmp_path / 'back', name)


def test_a_class_token_without_a_position_is_written_so(tmp_path):
  weights.write(weights.read(path_of('flexivit_timm')), tmp_path / 'timm', 'timm')
  assert_holds(tmp_path / 'timm', 'flexivit_timm')
  name = 'vit_bigvision_scan_tok'
  weights.write(weights.read(path_of(name)), tmp_path / 'a.npz', 'google')
  assert assert_reads_alike(tmp_path / 'a.npz', name).format == 'big_vision'
  weights.write(
    weights.read(path_of(name)), tmp_path / 'hf', 'hf'
  )  # with a row of zeros
  check(tmp_path / 'hf', name)


def test_stacked_blocks_load_from_safetensors(tmp_path):
  name = 'vit_bigvision_scan_tok'
  raw = readers.read(path_of(name))
  arrays = {name: np.asarray(x) for name, x in raw.arrays.items()}
  export.save(tmp_path / 'scanned.safetensors', arrays, raw.config)
  again = weights.read(tmp_path / 'scanned.safetensors')
  flat = weights.read(path_of(name)).flat
  assert again.flat.keys() == flat.keys()
  for key, x in flat.items():
    np.testing.assert_array_equal(again.flat[key], x, err_msg=key)


def write_google(tmp_path, **fields):
  """Returns (a file of weights for images of 16x24 px, its model, its arrays)."""
  fields = dict(depth=2, num_classes=3, classifier='token') | fields
  model = models.build('vit', 'mu/8', **fields)
  shapes, rng = model.shapes((16, 24, 3))['params'], np.random.default_rng(0)
  flat = {n: rng.normal(size=x.shape) for n, x in trees.flatten(shapes).items()}
  flat = {n: x.astype(np.float32) for n, x in flat.items()}
  google = formats.find_writer('vit', 'google')
  arrays, config = google.write(flat, model.fields(), (16, 24), None)
  export.save(tmp_path / 'model.npz', arrays, config)
  return tmp_path / 'model.npz', model, flat


@pytest.mark.parametrize(
  'fields',
  [
    dict(posemb='learn2d', posemb_where='shared'),
    dict(posemb='relative'),
    dict(attention='axial', classifier='gap', posemb='learn2d', posemb_where='every'),
  ],
  ids=lambda f: '-'.join(map(str, f.values())),
)
def test_files_keep_every_kind_of_positions(tmp_path, fields):
  path, model, flat = write_google(tmp_path, **fields)
  loaded = vit_jax.load(path)
  written, again = (x.fields() for x in (model, loaded.model))
  for field in written.keys() - formats.TRAINING:
    assert again[field] == written[field], field
  params = trees.flatten(loaded.params)
  assert params.keys() == flat.keys()
  for name, x in flat.items():
    np.testing.assert_array_equal(params[name], x, err_msg=name)


@pytest.mark.parametrize('scan', [False, True])
def test_tables_of_every_block_are_resized(tmp_path, scan):
  path, _, flat = write_google(tmp_path, posemb='learn2d', posemb_where='every')
  loaded = vit_jax.load(path, image_size=(40, 24), scan=scan)
  params = adapt.unstack(trees.flatten(loaded.params), models.family('vit'))
  for i in range(2):
    block = f'Transformer/encoderblock_{i}/posembed_input/pos_embedding_'
    for name in ('x', 'cls'):
      np.testing.assert_array_equal(params[block + name], flat[block + name])
    a, b = flat[block + 'y'][0]  # corners on corners: five rows between the two
    expected = [a + (b - a) * t for t in np.linspace(0, 1, 5)]
    np.testing.assert_allclose(params[block + 'y'][0], expected, atol=1e-6)


def test_relative_positions_are_not_resized(tmp_path):
  path, *_ = write_google(tmp_path, posemb='relative')
  with pytest.raises(UserError, match=naming('posembed_relative')):
    vit_jax.load(path, image_size=(40, 24))


# -- what a format cannot express -----------------------------------------------------


# family -> (fields of a small model, changes of each field that a file may hold)
SWIN_WINDOWS = dict(windows=(2, 2), borders='shift_pad')
CHANGES = {
  'vit': (
    dict(depth=1),
    dict(num_classes=[None], patch_size=[(8, 4)], width=[64], depth=[2], mlp_dim=[48])
    | dict(num_heads=[4], stem_blocks=[(1,), ()], stem_width=[32], norm_eps=[1e-5])
    | dict(classifier=['gap', 'map', 'query', 'none'], representation_size=[8])
    | dict(posemb=['learn2d', 'sincos2d', 'sincos2d_mae', 'relative', 'rotary', 'none'])
    | dict(posemb_where=['every', 'shared'], attention=['axial'], act=['gelu_erf'])
    | dict(posemb_tokens=['patches'], cls_token=[True], registers=[2], relpos=['layer'])
    | dict(relpos_dim=[12])
    | dict(
      rope=['eva', 'mixed', 'dinov3_max'],
      rope_base=[50.0, (1.0, 2.0, 3.0, 4.0)],
      rope_reference=[(3, 4)],
    )
    | dict(block=['post', 'parallel', 'branches'], mlp=['swiglu'], kv_heads=[(1, 2)])
    | dict(qkv_bias=['qv'], dense_bias=[False], patch_bias=[False], head_bias=[False])
    | dict(layer_scale_where=['attention'], norm=['rms'], extra_norms=[('mlp', 'qk')])
    | dict(final_norm=['pooled', 'none', 'untied'], map_heads=[1], map_mlp_dim=[24])
    | dict(map_prefix=[True], projection=[8], unit=[True]),
  ),
  'mixer': (
    dict(act='gelu_erf'),
    dict(num_classes=[None], patch_size=[(8, 4)], width=[64], depth=[1])
    | dict(tokens_mlp_dim=[24], channels_mlp_dim=[40], act=['gelu_tanh']),
  ),
  'resnet_gn': ({}, dict(num_classes=[None], blocks=[(1,)], width=[64])),
  'bit': (
    {},
    dict(num_classes=[None], blocks=[(1,)], width=[64], zero_pad_pool=[False]),
  ),
  'convnext': (
    {},
    dict(num_classes=[None], depths=[(2, 1)], widths=[(8, 8)], norm_eps=[1e-12])
    | dict(act=['gelu_tanh'], body_norm_eps=[1e-5], representation_size=[8])
    | dict(projection=[8], unit=[True], head_bias=[False]),
  ),
  'swin': (
    dict(depths=(1, 1), num_heads=(2, 4), **SWIN_WINDOWS),
    dict(num_classes=[None], version=[2], width=[32], depths=[(2, 1)], shift=[0.25])
    | dict(
      num_heads=[(1, 4)], windows=[(4, 4), (4, 2)], borders=['pad_shift', 'pad_always']
    )
    | dict(pretrained_windows=[(4, 4)], patch_size=[(2, 2), (4, 2)], mlp_ratio=[2.7])
    | dict(act=['gelu_tanh'], map_norms=[True]),
  ),
  'resnet': (
    dict(depths=(1, 1, 1, 1), widths=(32, 32, 32, 32), stem_width=64),
    dict(num_classes=[None], depths=[(1, 1, 2, 1)], widths=[(32, 32, 64, 32)])
    | dict(stem_width=[16], output_stride=[16, 64], deep_stem=[(32, 32), (8, 32)])
    | dict(block=['basic'], narrow=[(16, 16, 16, 16)], avg_down=[True])
    | dict(stride_first=[True], dilate_first=[True], norm_eps=[0.0], anti_alias=[True])
    | dict(pool=['attention'], projection=[8], unit=[True], head_bias=[False]),
  ),
  'mvit': (
    {},
    dict(num_classes=[None], width=[32], num_heads=[2], depths=[(1,)], expand=['mlp'])
    | dict(kv_stride=[2], mlp_ratio=[2.7], classifier=['token'], class_residual=[True])
    | dict(map_norms=[True], window=[4]),
  ),
  'vitdet': (
    dict(num_classes=None, neck=None),
    dict(num_classes=[3], patch_size=[(8, 4)], width=[64], depth=[1], mlp_dim=[32])
    | dict(num_heads=[4], global_blocks=[(0,), ()], window=[3], relative=[False])
    | dict(absolute=[False], pretrained_size=[(32, 32), (64, 32)], class_row=[False])
    | dict(act=['gelu_tanh'], norm_eps=[1e-5], neck=[8, 4]),
  ),
}

# A ViT that the authors of DINOv2 have; they have none as it is by default.
DINO = dict(num_classes=None, act='gelu_erf', layer_scale=1.0)
DINO |= dict(registers=2, posemb_tokens='cls')
CLIP = dict(act='quick_gelu', norm_eps=1e-5, extra_norms=('tokens',))
CLIP |= dict(patch_bias=False, head_bias=False)
OWN = {('vit', 'authors'): DINO, ('vit', 'open_clip'): CLIP}
# SAM's encoder, which timm has.
SAM = dict(num_classes=None, class_row=False, pretrained_size=(32, 32), neck=8)
OWN['vitdet', 'timm'] = SAM
# CLIP's ResNets, which other formats than open_clip's do not have at all.
OWN['resnet', 'open_clip'] = dict(
  widths=(32, 64, 128, 256),
  stem_width=8,
  deep_stem=(4, 4),
  anti_alias=True,
  pool='attention',
)

# (format, field, value) -> the value that is read again, of a model of equal outputs
EQUAL = {(to, 'posemb_tokens', 'patches'): 'prefix' for to in ('hf', 'open_clip')}
EQUAL |= {
  ('authors', 'posemb_tokens', 'patches'): 'cls',
  ('timm', 'head_bias', False): True,
}
for to in ('timm', 'authors', 'open_clip'):
  EQUAL |= {(to, 'posemb', kind): 'learn' for kind in ('sincos2d', 'sincos2d_mae')}
EQUAL['hf', 'posemb', 'sincos2d'] = 'learn'  # transformers has AIMv2's sincos2d_mae

# field -> fields that it needs beside it
BESIDE = {
  'stem_width': dict(stem_blocks=()),
  'layer_scale_where': dict(layer_scale=1.0),
  'map_heads': dict(classifier='map'),
  'map_mlp_dim': dict(classifier='map'),
  'map_prefix': dict(classifier='map', cls_token=True),
  'rope_base': dict(rope='dinov3'),
  'relpos_dim': dict(relpos='shared'),
  'rope_reference': dict(rope='eva'),
  'attention': dict(posemb='none', classifier='gap', registers=0),
  'pretrained_windows': dict(version=2),
  'class_residual': dict(classifier='token'),
  'dilate_first': dict(output_stride=16),
  'depth': dict(global_blocks=(0,)),
  'kv_heads': dict(depth=2),
}


def source_of(name, fields):
  """Returns zeros as the weights of a model for images of 32 x 32 px."""
  model = models.build(name, **fields)
  shapes = trees.flatten_variables(model.shapes((32, 32, 3)))
  flat = {n: np.zeros(x.shape, np.float32) for n, x in shapes.items()}
  source = Source(
    source='a run',
    format='run',
    family=name,
    fields=model.fields(),
    image_size=(32, 32),
    channels=3,
    flat=flat,
  )
  # open_clip's files have texts.
  if 'tokens' in source.fields.get('extra_norms', ()):
    source = dataclasses.replace(source, text=text_of('clip_openai'))
  if source.fields.get('anti_alias'):
    source = dataclasses.replace(source, text=text_of('clip_resnet_open_clip'))
  return source


@functools.cache
def text_of(name):
  return weights.read(path_of(name), **TOLD.get(name, {})).text


def refused(format, fields, source, out) -> str:
  """Writes a file; returns the message of a refusal, or ''.

  Most writers refuse by the fields alone: `source` is called only where they do not.
  """
  try:
    format.writer.config(fields, (32, 32), None)
  except ValueError as error:
    return str(error)
  try:
    weights.write(source(), out, format.to)
  except UserError as error:
    return str(error)
  return ''


@pytest.mark.parametrize(('name', 'only'), [*((n, None) for n in CHANGES), *OWN])
def test_a_field_is_read_again_or_refused_by_name(tmp_path, monkeypatch, name, only):
  monkeypatch.setitem(bit._TIMM_NAMES, ((1, 1), 32), 'resnetv2_50x1_bit')  # a small one
  usual, changes = CHANGES[name]
  usual = {
    'num_classes': 7,
    **models.family(name).tiny[0],
    **usual,
    **OWN.get((name, only), {}),
  }
  assert set(models.signature(name).parameters) - formats.TRAINING == set(changes)
  # A source without a task's own parameters is not written in the formats that hold them.
  every = [f for f in formats.all_formats() if f.family == name and f.writer]
  every = [f for f in every if not f.own]
  every = [f for f in every if (f.name if (name, f.name) in OWN else None) == only]
  cases = [{}] + [{key: value} for key, values in changes.items() for value in values]
  for number, change in enumerate(cases):
    beside = {k: v for key in change for k, v in BESIDE.get(key, {}).items()}
    beside = {k: v for k, v in beside.items() if k in changes}
    fields = models.build(name, **usual | beside | change).fields()
    source = functools.cache(lambda fields=fields: source_of(name, fields))
    for format in every:
      to = format.to
      out = tmp_path / (f'{number}.npz' if to == 'google' else f'{number}-{to}')
      if refusal := refused(format, fields, source, out):
        told = [f'{k}={v!r}' for k, v in fields.items()]
        assert change, (to, refusal)
        assert any(field in refusal for field in told), (to, refusal)
        continue
      again = models.build(name, **weights.read(out).fields).fields()
      for key in change.keys() - {*format.writer.alike}:
        expected = EQUAL.get((to, key, change[key]), change[key])
        assert again[key] == expected, (to, change)


@pytest.mark.parametrize('to', ['google', 'timm', 'hf'])
def test_a_field_that_no_writer_knows_is_refused(to):
  source = source_of('vit', models.family('vit').tiny[0])
  fields = source.fields | {'new': 1}
  with pytest.raises(ValueError, match=naming('new=1', to)):
    formats.find_writer('vit', to).write(source.flat, fields, (32, 32), None)


class Spy(dict):
  """Fields that record which of them are looked at."""

  def __init__(self, fields):
    super().__init__(fields)
    self.read = set()

  def __getitem__(self, key):
    self.read.add(key)
    return super().__getitem__(key)

  def get(self, key, default=None):
    self.read.add(key)
    return super().get(key, default)

  def __or__(self, other):
    self.read |= self.keys()
    return {**self} | other


@pytest.mark.parametrize('gap', ['', '_gap'])
def test_clips_resnets_are_written_for_timm(gap, tmp_path):
  name = f'resnet50_clip{gap}'
  fields = models.complete(name) | OWN['resnet', 'open_clip'] | dict(num_classes=5)
  fields['pool'] = 'mean' if gap else 'attention'
  source = source_of('resnet', fields)
  weights.write(source, tmp_path / 'a', 'timm')
  again = weights.read(tmp_path / 'a')
  assert models.complete('resnet', **again.fields) == fields
  assert {n: x.shape for n, x in again.flat.items()} == {
    n: x.shape for n, x in source.flat.items()
  }
  config = json.loads((tmp_path / 'a' / 'config.json').read_text())
  assert config['architecture'] == name
  with pytest.raises(UserError, match=naming('timm', 'depths', "'open_clip'")):
    weights.write(weights.read(path_of('clip_resnet_timm')), tmp_path / 'b', 'timm')


@pytest.mark.parametrize('name', [*CHANGES, 'detr', 'fpn', 'sfp'])
def test_writers_look_at_every_field(monkeypatch, name):
  # A field that an array's absence tells is read again as it was, whatever the publisher's
  # code makes of the file: its writer must have looked at it.
  monkeypatch.setitem(bit._TIMM_NAMES, ((1, 1), 32), 'resnetv2_50x1_bit')  # a small one
  usual, changes = CHANGES.get(name, ({}, {}))
  usual = models.family(name).tiny[0] | usual
  if name == 'fpn':
    usual['backbone'] = None
  written = set()
  for format in formats.all_formats():
    if format.family != name or not format.writer:
      continue
    for change in [{}, *({k: v} for k, values in changes.items() for v in values)]:
      beside = {k: v for key in change for k, v in BESIDE.get(key, {}).items()}
      beside = {k: v for k, v in beside.items() if k in changes}
      own = OWN.get((name, format.to), {})
      fields = Spy(models.build(name, **usual | own | beside | change).fields())
      try:
        config = format.writer.config(fields, (32, 32), None)
      except ValueError:
        continue
      written.add(format.to)
      if config.keys() - {'vit_jax'}:  # ours is read as it was written
        told = fields.read | formats.TRAINING | {*format.writer.alike}
        assert not fields.keys() - told, (format.to, change)
  assert written


@pytest.mark.parametrize(('field', 'value'), [('act', 'gelu_tanh'), ('norm_eps', 1e-5)])
def test_a_field_of_a_backbone_is_refused_by_name(tmp_path, field, value):
  fields = models.family('sfp').tiny[0]
  source = source_of('sfp', fields | {'backbone': fields['backbone'] | {field: value}})
  with pytest.raises(UserError, match=naming(f'{field}={value!r}', 'detectron2')):
    weights.write(source, tmp_path / 'a', 'detectron2')


def test_a_refusal_names_the_formats_that_can(tmp_path):
  fields = models.family('vit').tiny[0] | {'posemb': 'rotary'}
  with pytest.raises(UserError, match=naming("posemb='rotary'", ['google'])):
    weights.write(source_of('vit', fields), tmp_path / 'a', 'timm')


@pytest.mark.parametrize(
  ('name', 'to', 'fields', 'facts'),
  [
    ('swin_timm_pad', 'hf', {}, ('shift_pad', '56x56', '14x14')),
    ('swin_hf_pad', 'timm', {}, ('pad_shift', '56x56', '14x14')),
    ('swin_timm_rect', 'hf', {'borders': 'pad_shift'}, ('3x6', '48x96')),
  ],
)
def test_swins_that_a_format_cannot_express(tmp_path, name, to, fields, facts):
  source = weights.read(path_of(name), **fields)
  with pytest.raises(UserError, match=naming(source.source, *facts)):
    weights.write(source, tmp_path / 'out', to)


# -- facts in a config, a name, or neither --------------------------------------------


def test_heads_come_from_the_name_or_the_variant(tmp_path):
  model = models.build('vit', 'Ti/16', depth=1, num_classes=4)
  params = model.shapes((32, 32, 3))['params']
  flat = {n: np.zeros(x.shape, np.float32) for n, x in trees.flatten(params).items()}
  np.savez(tmp_path / 'a.npz', **flat)
  weights.write(weights.read(tmp_path / 'a.npz'), tmp_path / 'timm', 'timm')
  bare = tmp_path / 'weights.safetensors'  # neither config.json nor metadata
  save_file(load_file(tmp_path / 'timm' / 'model.safetensors'), bare)
  with pytest.raises(UserError, match=naming(bare, "variant='B/16'", 'num_heads')):
    weights.read(bare)
  named = bare.rename(tmp_path / 'vit_tiny_patch16_224.some_tag.safetensors')
  assert weights.read(named).fields['num_heads'] == 3
  assert weights.read(named, num_heads=6).fields['num_heads'] == 6
  with pytest.raises(UserError, match=naming(named, 'encoderblock_1/')):
    vit_jax.load(named, variant='Ti/16')  # 12 blocks


def timm_folder(tmp_path, architecture, drop=()):
  """The golden of timm under the name of another architecture."""

  def change(config):
    config['architecture'] = architecture
    for key in drop:
      del config['model_args'][key]

  return folder_of(tmp_path, 'vit_timm', change)


@pytest.mark.parametrize('name', ['deit_tiny_patch16_224', 'flexivit_small'])
def test_heads_come_from_the_architecture_in_the_config(tmp_path, name):
  # Published folders name the architecture and no number of heads.
  fields = weights.read(timm_folder(tmp_path, name, drop=['num_heads'])).fields
  heads = {'deit_tiny_patch16_224': 3, 'flexivit_small': 6}[name]
  assert (fields['num_heads'], fields['act']) == (heads, 'gelu_erf')


def test_architectures_and_types_that_are_not_known_are_refused(tmp_path):
  name = 'vit_base_patch16_odd_224.mine'
  folder = timm_folder(tmp_path, name)
  with pytest.raises(UserError, match=naming(folder, name, "act='gelu_erf'")):
    weights.read(folder)
  weights.read(folder, act='gelu_erf')  # by the user
  change = lambda config: config.update(model_type='dinov2')
  folder = folder_of(tmp_path / 'hf', 'vit_hf', change)
  with pytest.raises(UserError, match=naming(folder, 'vit.embeddings.cls_token')):
    weights.read(folder)
  change = lambda config: config.update(model_type='hiera')
  folder = folder_of(tmp_path / 'odd', 'vit_hf', change)
  with pytest.raises(UserError, match=naming(folder, "'hiera'", "'vit'")):
    weights.read(folder)


@pytest.mark.parametrize(
  ('name', 'act'),
  [
    # timm 1.0.31: the act_layer of these architectures.
    ('vit_base_patch16_siglip_224', 'gelu_erf'),
    ('vit_base_patch32_siglip_256', 'gelu_tanh'),
    ('vit_large_patch16_siglip_384', 'gelu_erf'),
    ('vit_large_patch16_siglip_512', 'gelu_tanh'),
    ('vit_so400m_patch14_siglip_384', 'gelu_erf'),
    ('vit_so400m_patch16_siglip_384', 'gelu_tanh'),
    ('vit_giantopt_patch16_siglip_256', 'gelu_tanh'),
  ],
)
def test_the_gelu_of_siglip_of_timm(name, act):
  facts = formats.find_writer('vit', 'timm').facts
  assert facts({'architecture': name, 'global_pool': 'map'}, '').fields['act'] == act
  gap = {'architecture': name.replace('siglip', 'siglip_gap'), 'global_pool': 'avg'}
  assert facts(gap, '').fields['act'] == act


# Arguments as timm 1.0.31 saves them with a model, and of training.
SAVED = {'in_chans': 3, 'num_classes': 10, 'img_size': [64, 64], 'drop_path_rate': 0.1}


@pytest.mark.parametrize('place', ['model_args', 'pretrained_cfg', None])
@pytest.mark.parametrize(
  ('family', 'args'),
  [
    ('convnext', {'output_stride': 16}),
    ('convnext', {'kernel_sizes': 5}),
    ('bit', {'output_stride': 16}),
    ('bit', {'avg_down': True}),
    ('vit', {'global_pool': 'avgmax'}),
    *(
      (family, args)
      for family in ('vit', 'bit', 'convnext', 'mixer', 'mvit', 'resnet', 'swin')
      for args in ({'global_pool': 'max'}, {'something_new': 1})
    ),
  ],
)
def test_arguments_of_timm_that_change_what_is_computed(family, args, place):
  reader = formats.find_writer(family, 'timm').facts
  pool = {'global_pool': 'token' if family == 'vit' else 'avg'}
  reader({'model_args': SAVED | pool}, '')
  if 'global_pool' not in args:
    place = 'model_args'
  config = {place: args} if place else args
  with pytest.raises(ValueError, match=naming(*args)):
    reader(config, '')


def test_windows_of_swin_v2_come_from_the_name(tmp_path):
  def change(config):
    for key in ('window_size', 'pretrained_window_sizes'):
      del config['model_args'][key]
    config['architecture'] = 'swinv2_base_window12to24_192to384.ms_in22k_ft_in1k'

  folder = folder_of(tmp_path, 'swinv2_timm_pre', change)
  fields = weights.read(folder).fields
  assert fields['windows'] == (24, 24, 24)
  assert fields['pretrained_windows'] == (12, 12, 6)
  file = (folder / 'model.safetensors').rename(tmp_path / 'a.safetensors')
  with pytest.raises(UserError, match=naming('windows=None')):
    vit_jax.load(file)
  assert weights.read(file, windows=(4, 4, 4)).fields['windows'] == (4, 4, 4)


@pytest.mark.parametrize(
  ('name', 'key', 'value', 'facts'),
  [
    ('swin_timm', 'model_args.always_partition', True, ('always_partition', 'True')),
    ('swin_timm', 'global_pool', 'max', ('global_pool', "'max'")),
    ('swin_timm', 'model_args.window_size', 'four', ('window_size', "'four'")),
    ('swin_timm_rect', 'model_args.window_size', 5, ('stage 3', '35', 'window')),
    ('swin_hf', 'layer_norm_eps', 1e-6, ('layer_norm_eps', '1e-06', '1e-05')),
    ('swinv2_hf', 'model_type', 'swinv3', ("'swinv3'", "'swin'")),
    ('swinv2_timm_pre', 'model_args.window_size', [4, 8], ('window_size', 'square')),
  ],
)
def test_configs_of_swins_that_are_not_read(tmp_path, name, key, value, facts):
  part, _, last = key.rpartition('.')
  change = lambda config: (config[part] if part else config).update({last: value})
  folder = folder_of(tmp_path, name, change)
  with pytest.raises(UserError, match=naming(folder, *facts)):
    weights.read(folder)


# -- class names and pipelines --------------------------------------------------------


def test_class_names_and_pipeline_come_from_the_config(tmp_path):
  names = [f'animal {i}' for i in range(10)]
  labels = {str(i): name for i, name in enumerate(names)}
  folder = folder_of(tmp_path, 'vit_hf', lambda config: config.update(id2label=labels))
  loaded = vit_jax.load(folder)
  assert loaded.class_names == names
  assert loaded.pp == "decode|resize(32, rounding='none')|value_range(-1, 1)"
  assert weights.read(path_of('vit_timm')).pp == (
    "decode(whole=True)|resize_small(35, method='bicubic', rounding='nearest')"
    "|central_crop(32, half='even')"
    '|value_range(-1, 1)'
  )


def test_images_of_timm_cover_a_size_that_is_not_square():
  pp = pipelines.read_timm({'crop_pct': 0.8}, (24, 40))
  assert pp.startswith('decode(whole=True)|resize_small(50, ')
  assert "|central_crop((24, 40), half='even')|" in pp


def test_preprocessing_of_transformers(tmp_path):
  folder = folder_of(tmp_path, 'vit_hf')
  path = folder / 'preprocessor_config.json'
  plain = {'size': {'height': 32, 'width': 32}, 'resample': 2, 'do_normalize': True}
  path.write_text(json.dumps(plain))
  assert weights.read(folder).pp == (
    'decode(whole=True)'
    "|resize((32, 32), method='bilinear', antialias=True, rounding='nearest')"
    '|value_range(-1, 1)'
  )
  crop = {'size': {'shortest_edge': 36}, 'resample': 3, 'do_center_crop': True}
  levels = {'image_mean': [0.4, 0.5, 0.6], 'image_std': [0.2, 0.25, 0.5]}
  path.write_text(json.dumps({**crop, 'crop_size': 32, **levels}))
  pp = weights.read(folder).pp
  assert pp == (
    'decode(whole=True)'
    "|resize_small(36, method='bicubic', antialias=True, rounding='nearest')"
    '|central_crop((32, 32))|value_range((-2.0, -2.0, -1.2), (3.0, 2.0, 0.8))'
  )
  x = np.full((36, 40, 3), 102, np.uint8)  # 0.4
  np.testing.assert_allclose(SingleImage(pp)(x)[0, 0], [0, -0.4, -0.4], atol=1e-6)
  # Pixels of a JPEG are all decoded, however large it is.
  large = Image.fromarray(
    np.random.default_rng(0).integers(0, 256, (200, 300, 3), 'uint8')
  )
  large.save(tmp_path / 'large.jpg', quality=95)
  decoded = np.asarray(Image.open(tmp_path / 'large.jpg'))
  whole = SingleImage(pp)(tmp_path / 'large.jpg')
  np.testing.assert_array_equal(whole, SingleImage(pp)(decoded))
  # ConvNeXt's processor, in the spelling of microsoft/resnet-50; it squashes from 384 px on.
  for side, ops in (
    (224, ('resize_small(256,', 'central_crop((224, 224))')),
    (384, ('resize((384, 384),', 'value_range')),
  ):
    path.write_text(json.dumps({'size': side, 'crop_pct': 0.875, 'resample': 3}))
    steps = weights.read(folder).pp.split('|')
    assert all(a.startswith(b) for a, b in zip(steps[1:3], ops, strict=True)), steps
  path.write_text(json.dumps(plain | {'resample': 5}))
  with pytest.raises(UserError, match=naming(folder, 'resample=5', 'bicubic')):
    weights.read(folder)


def test_files_without_a_config_have_the_pixels_of_their_family(tmp_path):
  for name, levels in (
    ('convnext_timm', 'value_range((-2.1179039, '),
    ('vit_timm', 'value_range(-1'),
  ):
    save_file(arrays_of(name), tmp_path / f'{name}.safetensors')
    loaded = vit_jax.load(
      tmp_path / f'{name}.safetensors',
      **({'num_heads': 3} if name == 'vit_timm' else {}),
    )
    assert loaded.pp.split('|')[-1].startswith(levels)


@pytest.mark.parametrize(
  'pp',
  [
    "decode|resize((32, 48), method='bicubic', antialias=True, rounding='nearest')"
    '|value_range(-1, 1)',
    "decode|resize((36, 54), method='area', antialias=True, rounding='nearest')"
    '|central_crop((32, 48))|value_range(-1, 1)',
    "decode|resize_small(40, method='bilinear', antialias=True, rounding='nearest')"
    '|central_crop((32, 32))|value_range((-2.0, -1.8, -1.2), (3.0, 2.2, 0.8))',
  ],
)
def test_preprocessing_goes_through_both_libraries(pp):
  described = pipelines.describe(pp)
  # With an even rest to crop: they differ in where half a pixel goes.
  image = np.asarray(Image.effect_noise((88, 70), 60))[..., None].repeat(3, -1)
  expected = SingleImage(pp)(image)
  for back in (
    pipelines.read_timm(described.timm(), described.size),
    pipelines.read_hf(described.hf(), described.size),
  ):
    np.testing.assert_allclose(SingleImage(back)(image), expected, atol=1e-5)


@pytest.mark.parametrize(
  'pp',
  [
    'decode|resize(32)|flip_lr|value_range(-1, 1)',
    'decode|resize(32)|value_range(-1, 1, clip=True)',
    'decode|resize(32)',
  ],
)
def test_pipelines_that_they_cannot_say(pp):
  assert pipelines.describe(pp) is None
