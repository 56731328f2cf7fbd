"""Runs a program on all devices of a mesh, each of which has its own pieces of weights and cache.

What is cut has an axis more outside of programs, the first one, with an entry for each device (`cutting`).
The cache has none: its first axis has the entries of one device behind those of another. Inside, a program
sees what its device has, so programs are written for one device. Everything else is the same on all devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.runtime.models.load_rules import AXIS

CUT = PartitionSpec(AXIS)
"""Of arrays with an entry for each device."""
JOINED = PartitionSpec(AXIS, None)
"""Of arrays whose first axis is cut, as that of the cache is. XLA's TPU backend copies a donated array if an
axis is taken from it and given back. JAX places such arrays as it places those that are `CUT`, but the two
are not equal."""
WHOLE = PartitionSpec()
"""Of arrays that are the same on all devices."""


def cut_sharding(mesh: Mesh) -> NamedSharding:
    """Tell where weights and adapters lie: on a mesh of one device they have no axis more."""
    return NamedSharding(mesh, CUT if mesh.size > 1 else WHOLE)


def joined_sharding(mesh: Mesh) -> NamedSharding:
    """Tell where the cache lies: on a mesh of one device it is whole."""
    return NamedSharding(mesh, JOINED if mesh.size > 1 else WHOLE)


def own_shape(shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """Return the shape that a program sees of a cut array."""
    return shape[1:] if mesh.size > 1 else shape


def all_shape(shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of a cut array of which a program sees this one."""
    return (mesh.size, *shape) if mesh.size > 1 else shape


def specs_of(arguments: Any) -> Any:
    """Tell which of these arrays, or shapes with a sharding, are `CUT`, `JOINED` and `WHOLE`. One that has no
    place on a mesh is whole.
    """
    shardings = jax.tree.map(lambda array: array.sharding, arguments)
    return jax.tree.map(lambda at: at.spec if isinstance(at, NamedSharding) else WHOLE, shardings)


def on_mesh(program: Callable[..., Any], mesh: Mesh, arguments: Any, results: Any) -> Callable[..., Any]:
    """Make the program for all devices. arguments, results: which of them are `CUT`, `JOINED` and `WHOLE`, as
    prefixes of their trees.
    """
    if mesh.size == 1:
        return program

    @functools.wraps(program)
    def on_one(*given: Any) -> Any:
        own = _where_cut(lambda array: array[0], arguments, given)
        return _where_cut(lambda array: array[None], results, program(*own))

    return jax.shard_map(on_one, mesh=mesh, in_specs=arguments, out_specs=results, check_vma=False)


def _where_cut(change: Callable[[jax.Array], jax.Array], specs: Any, arrays: Any) -> Any:
    """Return the arrays with a change made to those that are cut."""
    return jax.tree.map(lambda spec, part: jax.tree.map(change, part) if spec == CUT else part, specs, arrays)
