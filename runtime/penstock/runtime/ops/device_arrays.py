"""Arrays that are made on the devices where they are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

ZerosOf: TypeAlias = Callable[[tuple[int, ...], np.dtype], jax.Array]
"""What an array of zeros is made with, inside a program."""


def zeros(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding, count: int = 1
) -> tuple[jax.Array, ...]:
    """`count` arrays of zeros, each with memory of its own, made by the devices of `sharding`. The host never
    holds them.
    """
    make = _program(shape, dtype, sharding, jnp.zeros)
    return tuple(make() for _ in range(count))


def zeros_maker(
    shapes: Any, sharding: jax.sharding.Sharding, zeros_of: ZerosOf = jnp.zeros
) -> Callable[[], Any]:
    """Make trees of arrays of zeros, of a tree of shapes and dtypes (`jax.ShapeDtypeStruct`), each by a
    program that calls `zeros_of`. Each leaf is an array of its own, because slices of a stacked one are off
    XLA's fast paths on CPU. All is compiled here, and nothing when the result is called.
    """
    leaves, tree = jax.tree.flatten(shapes)
    kinds = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
    programs = {kind: _program(*kind, sharding, zeros_of).lower().compile() for kind in dict.fromkeys(kinds)}
    return lambda: jax.tree.unflatten(tree, [programs[kind]() for kind in kinds])


def _program(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding, zeros_of: ZerosOf
) -> Any:
    return jax.jit(partial(zeros_of, shape, dtype), out_shardings=sharding)
