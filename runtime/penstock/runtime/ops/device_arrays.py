"""Arrays that are made on the devices where they are kept, or put there, also where other processes have some
of the devices.

`jax.device_put` compares an array between all processes, which is a collective for each call. What is here
compares nothing: each process puts what its own devices have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

ZerosOf: TypeAlias = Callable[[tuple[int, ...], np.dtype], jax.Array]
"""What an array of zeros is made with, inside a program."""


def zeros(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding, count: int = 1
) -> tuple[jax.Array, ...]:
    """Make `count` arrays of zeros, each with memory of its own, made by the devices of `sharding`. The host
    never holds them.
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


def put_equal(array: npt.NDArray[Any], sharding: jax.sharding.Sharding) -> jax.Array:
    """Put the host array on the devices of `sharding`, each of which has all of it or its own part. Every
    process calls this with the same array, which must not be written again.
    """
    if sharding.is_fully_addressable:
        placed: jax.Array = jax.device_put(array, sharding)
        return placed
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def own_values(array: jax.Array) -> npt.NDArray[Any]:
    """Return what the devices of this process have of an array that is cut along its first axis, as `put_own`
    takes it.
    """
    if array.is_fully_addressable:
        return np.asarray(array)
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start)
    parts = [np.asarray(shard.data) for shard in shards]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def put_own(array: npt.NDArray[Any], sharding: jax.sharding.Sharding) -> jax.Array:
    """Make the array of which the devices of this process have `array`, cut along its first axis. On CPU an
    aligned array is taken as it is, and must not be written again.
    """
    if sharding.is_fully_addressable:
        own: jax.Array = jax.device_put(array, sharding)
        return own
    entries = len(sharding.device_set)
    made: jax.Array = jax.make_array_from_process_local_data(sharding, array, (entries, *array.shape[1:]))
    return made
