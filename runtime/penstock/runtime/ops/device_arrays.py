"""Arrays that are made on the devices where they are kept."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def zeros(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding, count: int = 1
) -> tuple[jax.Array, ...]:
    """`count` arrays of zeros, each with memory of its own, made by the devices of `sharding`. The host never
    holds them.
    """
    make = jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)
    return tuple(make() for _ in range(count))


def zeros_like(shapes: Any, sharding: jax.sharding.Sharding) -> Any:
    """A tree of arrays of zeros, from a tree of shapes and dtypes (`jax.ShapeDtypeStruct`). Each leaf is an
    array of its own, because slices of a stacked one are off XLA's fast paths on CPU.
    """
    leaves, tree = jax.tree.flatten(shapes)
    counts = Counter((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
    made = {kind: iter(zeros(*kind, sharding, count)) for kind, count in counts.items()}
    return jax.tree.unflatten(tree, [next(made[leaf.shape, np.dtype(leaf.dtype)]) for leaf in leaves])
