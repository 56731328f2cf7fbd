"""Arrays made where they live."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


def zeros(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding, count: int = 1
) -> tuple[jax.Array, ...]:
    """`count` arrays of zeros, each its own memory, made by the devices of `sharding`: the host holds none of
    them at any time.
    """
    make = jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)
    return tuple(make() for _ in range(count))
