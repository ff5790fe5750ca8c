"""Programs for TPUs that are not there: traced and lowered under an abstract mesh."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from vit_jax import kernels

KINDS = {'v3': 'TPU v3', 'v5e': 'TPU v5 lite', 'v6e': 'TPU v6 lite'}


@pytest.fixture
def interpreted():
  """Lets kernels for TPUs run on any platform, slowly, with the memories of a TPU.

  A race raises an error, and so does a read beyond the end of an array. Memory that was not
  written holds NaN.
  """
  with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
    yield


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
