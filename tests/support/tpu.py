"""Programs for TPUs that are not there: traced and lowered under an abstract mesh."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from vit_jax import kernels

KINDS = {'v3': 'TPU v3', 'v5e': 'TPU v5 lite', 'v6e': 'TPU v6 lite'}


@pytest.fixture
def interpreted(monkeypatch):
  """Lets Pallas kernels run on any platform, slowly."""
  run = functools.partial(pl.pallas_call, interpret=True)
  monkeypatch.setattr(pl, 'pallas_call', run)


def mesh(generation: str, *sizes: int):
  """Returns the context of an abstract mesh of TPUs, (data, fsdp, tensor) or one device."""
  device = AbstractDevice(device_kind=KINDS[generation], num_cores=1, platform='tpu')
  abstract = AbstractMesh(
    sizes or (1, 1, 1),
    ('data', 'fsdp', 'tensor'),
    axis_types=(AxisType.Auto,) * 3,
    abstract_device=device,
  )
  return jax.sharding.use_abstract_mesh(abstract)


def kernels_in(function, *args, generation: str = 'v5e') -> int:
  """Returns the number of kernels in the program of function(*args), if all are allowed."""
  with mesh(generation), kernels.using(*kernels.KERNELS):
    traced = jax.jit(lambda *args: function(*args)).trace(*args)
    text = traced.lower(lowering_platforms=('tpu',)).as_text()
  return text.count('@tpu_custom_call')


def kernels_in_step(model, *shape: int) -> int:
  """Returns the number of kernels in the gradient of a model for images of this shape."""
  images = jax.ShapeDtypeStruct(shape, jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images)
  loss = lambda params, images: model.apply(params, images, features=False)[0].sum()
  return kernels_in(jax.grad(loss), params, images)
