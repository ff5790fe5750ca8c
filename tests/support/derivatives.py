"""Derivatives of ours beside those that JAX derives of a plain formula."""

import jax
import jax.numpy as jnp
import numpy as np

RNG = np.random.default_rng(0)


def normal(*shape):
  return RNG.normal(size=shape).astype(np.float32)


def assert_same_derivatives(ours, plain, *args):
  """Compares with JAX's derivatives of `plain`: forward, reverse, one in the other."""
  weight = normal(*plain(*args).shape)
  tangents = tuple(normal(*x.shape) for x in args)
  every = tuple(range(len(args)))

  def derivatives(fn):
    loss = lambda *args: (jnp.sin(fn(*args)) * weight).sum()
    forward = jax.jvp(fn, args, tangents)
    return forward, jax.jvp(jax.grad(loss, every), args, tangents)

  both = (
    jax.tree.leaves(jax.jit(derivatives, static_argnums=0)(f)) for f in (ours, plain)
  )
  for a, b in zip(*both, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)  # float32, sums of hundreds
