"""Compiled programs that engines of the suite share.

An engine compiles every program when it starts. Even if all of them are in the cache on disk, JAX traces and
lowers the model for each one, which takes most of a small engine's start. Many tests start an engine that
another test of the process has started before with the same sizes, so its programs are kept here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.ffi

from penstock.runtime.execution.program_set import ProgramBuilder, Programs

MOST_KEPT = 24
"""Sets of programs that are kept. Those that were used longest ago go first."""
MOST_MAPPINGS = 32_000
"""Pieces of memory that a process may have before sets go. Linux gives it no more than 65,530
(vm.max_map_count), and without another one XLA crashes. As users compile them, some sets take thousands.
"""

_kept: dict[Hashable, Programs] = {}
"""What a set was compiled for, and the set; the one that was used last is at the end."""


def _shapes(tree: Any) -> Hashable:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding) for leaf in leaves)


def compiled_for(builder: ProgramBuilder) -> Hashable:
    """Everything that decides which programs the builder makes. Weights count by their shapes, because
    programs get them as arguments.
    """
    device: Any = builder.rebuild.__self__  # type: ignore[attr-defined] # a method of DeviceState
    return (
        dataclasses.replace(builder.config, show_progress=False, program_folder=None, ahead=None),
        device._graphdef,
        device._weights_tree,
        _shapes((builder.weights, builder.state, builder.kv, builder.pool, builder.adapters)),
        _shapes((builder.draft_weights, builder.text)),
        None if builder.draft is None else (builder.draft.graphdef, builder.draft.cache, device._draft_tree),
        builder.cache,
        builder.stage,
        builder.num_pages,
        builder.backend,
        builder.sharding,
        jax.ffi.ffi_call,  # tests put another in its place to call emulated kernels
        jax.config.read("jax_disable_most_optimizations"),
    )


def _num_mappings() -> int:
    """Count this process' pieces of memory; 0 where the system does not tell."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def forget_programs() -> None:
    """Have the next engine of every kind compile its own programs."""
    _kept.clear()


@contextmanager
def shared_programs() -> Iterator[None]:
    """Within the block, an engine whose programs are those of an earlier one gets them from it. Its weights,
    cache and state are its own, and it runs every program once before it serves, as always.

    A test that changes what a model or an operation computes while it is traced calls `forget_programs`.
    """
    compile_all = ProgramBuilder.compile_all

    def shared(builder: ProgramBuilder) -> Programs:
        key = compiled_for(builder)
        programs = _kept.pop(key, None) or compile_all(builder)
        _kept[key] = programs
        while len(_kept) > 1 and (len(_kept) > MOST_KEPT or _num_mappings() > MOST_MAPPINGS):
            del _kept[next(iter(_kept))]
        return programs

    with (
        mock.patch.object(ProgramBuilder, "compile_all", shared),
        # No set is taken from disk, because a test may have changed what its programs compute. So each is
        # traced, and taken by what it computes.
        mock.patch.object(ProgramBuilder, "_key", return_value=None),
    ):
        yield
