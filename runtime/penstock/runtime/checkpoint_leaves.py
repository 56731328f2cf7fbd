"""From a checkpoint's tensors to the leaves of a model's state, on the device.

A leaf is made in host memory, by several threads that fill it with rows of the tensors that belong there, and
placed as soon as it is whole. So what is needed beyond the leaves is some rows for each thread; and on CPU,
where JAX takes such memory as it is, no leaf exists twice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from penstock.runtime import host_memory
from penstock.runtime.models.params import Leaves, ParamSpec
from penstock.runtime.models.registry import ParamPath
from penstock.runtime.native.linear import BLOCK_OUT

_TASK_VALUES = 1 << 21
"""Values of a tensor that one thread takes at a time."""
_STEP_VALUES = 1 << 19
"""Values that it converts at a time: what is made of them on the way stays in its cache."""

Part: TypeAlias = tuple[slice, ...]


class Tensor(Protocol):
    """A tensor whose rows can be read one run after the other, such as an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, rows: slice, /) -> npt.NDArray[Any]: ...


@dataclass(frozen=True, slots=True)
class NewLeaf:
    """A leaf on the device; `parts` of it are new, or, if None, all of it."""

    value: jax.Array
    parts: Sequence[Part] | None = None


def make_leaves(
    specs: Sequence[ParamSpec],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[ParamPath, jax.ShapeDtypeStruct],
    place: Callable[[ParamPath, npt.NDArray[Any]], jax.Array],
    *,
    threads: int,
    old: Callable[[ParamPath], npt.NDArray[Any]] | None = None,
    done: Callable[[ParamSpec], None] = lambda spec: None,
) -> tuple[dict[ParamPath, NewLeaf], list[str]]:
    """The leaves that `tensors` fill, and what is wrong with values, by tensor.

    specs: all of the model's; those without a tensor are left out. Then `old` gives the leaf that they are
    part of. place: puts a host array on the device; it is never written again. threads: how many fill leaves.
    done: called when a tensor is in its leaf, in the order of specs. Names, shapes and dtypes must have been
    checked.
    """
    work = _Work(specs, tensors, shapes, place, old)
    problems: list[str] = []
    ahead: deque[tuple[ParamSpec, Future[bool], bool]] = deque()

    def settle_one() -> None:
        spec, future, last = ahead.popleft()
        if future.result():
            problem = f"{spec.hf_name} has values beyond the range of {spec.dtype}"
            if problem not in problems:
                problems.append(problem)
        if last:
            work.placed(spec)
            done(spec)

    pool = ThreadPoolExecutor(threads, "penstock-weights")
    try:
        for spec in work.specs:
            tensor, leaves = tensors[spec.hf_name], work.opened(spec)
            for begin, end in _runs(spec):
                if len(ahead) == 2 * threads:
                    settle_one()
                future = pool.submit(_fill, spec, tensor, leaves, begin, end)
                ahead.append((spec, future, end == spec.shape[0]))
        while ahead:
            settle_one()
    finally:
        pool.shutdown(cancel_futures=True)
    return work.made, problems


class _Work:
    """Leaves that are being filled, and those that are whole."""

    def __init__(
        self,
        specs: Iterable[ParamSpec],
        tensors: Mapping[str, Tensor],
        shapes: Mapping[ParamPath, jax.ShapeDtypeStruct],
        place: Callable[[ParamPath, npt.NDArray[Any]], jax.Array],
        old: Callable[[ParamPath], npt.NDArray[Any]] | None,
    ) -> None:
        specs = tuple(specs)
        self.specs = [spec for spec in specs if spec.hf_name in tensors]
        self.made: dict[ParamPath, NewLeaf] = {}
        self._missing = Counter(path for spec in self.specs for path in spec.parts)
        everything = Counter(path for spec in specs for path in spec.parts)
        self._partial = {path for path, count in self._missing.items() if count < everything[path]}
        self._shapes, self._place, self._old = shapes, place, old
        self._open: dict[ParamPath, npt.NDArray[Any]] = {}

    def opened(self, spec: ParamSpec) -> Leaves:
        """Host arrays of the leaves that a tensor fills."""
        for path in spec.parts:
            if path not in self._open:
                shape = self._shapes[path]
                leaf = self._open[path] = host_memory.zeros(shape.shape, shape.dtype)
                if path in self._partial:
                    assert self._old is not None, "only an update may be partial"
                    leaf[...] = self._old(path)
        return {path: self._open[path] for path in spec.parts}

    def placed(self, spec: ParamSpec) -> None:
        """A tensor is in its leaves: place those that are whole now."""
        for path in spec.parts:
            self._missing[path] -= 1
            if self._missing[path] == 0:
                parts = [filled.parts[path] for filled in self.specs if path in filled.parts]
                value = self._place(path, self._open.pop(path))
                jax.block_until_ready(value)
                host_memory.let_go()  # where JAX has not taken it as it is, it is over there now
                self.made[path] = NewLeaf(value, parts if path in self._partial else None)


def _runs(spec: ParamSpec) -> list[tuple[int, int]]:
    """Rows for one task each."""
    rows = _rows_of(spec, _TASK_VALUES)
    return [(begin, min(begin + rows, spec.shape[0])) for begin in range(0, spec.shape[0], rows)]


def _rows_of(spec: ParamSpec, num_values: int) -> int:
    """Rows of about so many values; whole blocks of a packed leaf's."""
    per_row = int(np.prod(spec.shape[1:], dtype=np.int64))
    return max(1, num_values // max(1, per_row) // BLOCK_OUT) * BLOCK_OUT


def _fill(spec: ParamSpec, tensor: Tensor, leaves: Leaves, begin: int, end: int) -> bool:
    """Put rows of a tensor into its leaves; whether the parameter's dtype cannot hold some value."""
    is_narrower = _largest(tensor.dtype) > _largest(spec.dtype)
    overflows = False
    step = _rows_of(spec, _STEP_VALUES)
    for first in range(begin, end, step):
        rows = tensor[first : min(first + step, end)]
        with np.errstate(over="ignore"):
            values = rows.astype(spec.dtype, copy=False)
        overflows |= is_narrower and bool(np.isinf(values).any())
        spec.fill(leaves, first, values)
    return overflows


def _largest(dtype: np.dtype[Any]) -> float:
    return float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]  # jax leaves finfo unannotated
