"""ONNX files, run by ONNX Runtime in processes that cannot import this library."""

import json
import re
import sys

import pytest

from tests.support import naming
from tests.support.exported import ALL, SOURCE, check, run
from vit_jax import weights
from vit_jax.kernels import depthwise
from vit_jax.tools.export import __main__ as export
from vit_jax.tools.export import onnx, program


@pytest.fixture
def traces_cleared(traces_kept, monkeypatch):
  """Lets `jax.clear_caches` clear them, as outside of the tests."""
  monkeypatch.setattr(traces_kept, 'side_effect', traces_kept.real)


@pytest.mark.onnx
@pytest.mark.usefixtures('traces_cleared')
@pytest.mark.parametrize('golden', ALL)
def test_onnx_without_this_library(golden, tmp_path):
  file, _ = check(golden, 'onnx', tmp_path)
  session = pytest.importorskip('onnxruntime').InferenceSession(file)
  about = session.get_modelmeta().custom_metadata_map
  assert json.loads(about['input'])['layout'] == 'NHWC'
  assert json.loads(about['class_names']) is None


@pytest.mark.onnx
@pytest.mark.usefixtures('traces_cleared')
@pytest.mark.parametrize('golden', ['convnext_timm', 'mvit_timm'])
def test_onnx_of_layers_that_choose_by_platform(golden, tmp_path, monkeypatch):
  monkeypatch.setattr(depthwise, '_SMALL', 0)
  check(golden, 'onnx', tmp_path)


@pytest.mark.onnx
@pytest.mark.usefixtures('traces_cleared')
def test_large_onnx_models_have_their_parameters_beside(tmp_path, monkeypatch):
  monkeypatch.setattr(onnx, '_MOST_BYTES', 1000)
  file, _ = check('vit_google_token', 'onnx', tmp_path)
  data = file.with_name('model.onnx.data')
  assert data.stat().st_size > file.stat().st_size


def test_onnx_is_refused_with_what_to_do(tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, 'jax2onnx', None)  # as if it were not installed
  assert run(SOURCE, tmp_path / 'm.onnx', '--to', 'onnx') == 2
  assert re.search(naming('jax2onnx', '.venv-onnx'), capsys.readouterr().err)
  half = program.Program(weights.load(SOURCE, dtype='bfloat16'), (), None)
  with pytest.raises(export.UserError, match=naming('bfloat16', '--dtype float32')):
    onnx.check(half)
