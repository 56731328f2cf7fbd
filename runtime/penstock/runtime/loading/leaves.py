"""Makes the leaves of a model's state, on the device, from a checkpoint's tensors.

Several threads fill a leaf in host memory by the model's rules (`models.load_rules`), and it is placed as
soon as it is complete. So beyond the leaves only some rows for each thread are needed. On CPU, where JAX
takes such memory as it is, no leaf exists twice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy.typing as npt

from penstock.runtime.host import host_memory
from penstock.runtime.models.load_rules import Leaves, LoadRule, ParamPath, Part, Tensor

_TASK_VALUES = 1 << 21
"""How many values of tensors one thread takes at a time."""
_STEP_VALUES = 1 << 19
"""How many values it converts at a time, so that intermediate values stay in its cache."""


@dataclass(frozen=True, slots=True)
class NewLeaf:
    """A leaf on the device, of which `parts` are new; None: all of it is new."""

    value: jax.Array
    parts: Sequence[Part] | None = None


def make_leaves(
    rules: Sequence[LoadRule],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[ParamPath, jax.ShapeDtypeStruct],
    place: Callable[[ParamPath, npt.NDArray[Any]], jax.Array],
    *,
    threads: int,
    old: Callable[[ParamPath], npt.NDArray[Any]] | None = None,
    done: Callable[[LoadRule], None] = lambda rule: None,
) -> tuple[dict[ParamPath, NewLeaf], list[str]]:
    """Makes the leaves that `tensors` fill. Returns them, and what is wrong with the values of tensors.

    rules: all rules of the model; those without tensors are left out, and `old` gives the leaf that they
    would fill. place: puts a host array on the device; the array is never written again. threads: how many
    fill leaves. done: called when a rule's tensors are in its leaves, in the order of the rules. Names,
    shapes and dtypes must have been checked.
    """
    work = _Work(rules, tensors, shapes, place, old)
    problems: list[str] = []
    ahead: deque[tuple[LoadRule, Future[list[str]], bool]] = deque()

    def settle_one() -> None:
        rule, future, last = ahead.popleft()
        for name in future.result():
            problem = f"{name} has values beyond the range of {rule.dtype}"
            if problem not in problems:
                problems.append(problem)
        if last:
            work.placed(rule)
            done(rule)

    pool = ThreadPoolExecutor(threads, "penstock-weights")
    taken: dict[str, Tensor] = {}
    try:
        for rule in work.rules:
            # A tensor that several rules read, one after the other, is asked for once.
            names = [source.name for source in rule.sources]
            taken = {name: taken[name] if name in taken else tensors[name] for name in names}
            leaves = work.opened(rule)
            for begin, end in _runs(rule):
                if len(ahead) == 2 * threads:
                    settle_one()
                future = pool.submit(_fill, rule, taken, leaves, begin, end)
                ahead.append((rule, future, end == rule.num_rows))
        while ahead:
            settle_one()
    finally:
        pool.shutdown(cancel_futures=True)
    return work.made, problems


class _Work:
    """The leaves that are being filled, and those that are complete."""

    def __init__(
        self,
        rules: Sequence[LoadRule],
        tensors: Mapping[str, Tensor],
        shapes: Mapping[ParamPath, jax.ShapeDtypeStruct],
        place: Callable[[ParamPath, npt.NDArray[Any]], jax.Array],
        old: Callable[[ParamPath], npt.NDArray[Any]] | None,
    ) -> None:
        self.rules = [rule for rule in rules if all(source.name in tensors for source in rule.sources)]
        self.made: dict[ParamPath, NewLeaf] = {}
        self._missing = Counter(path for rule in self.rules for path in rule.paths)
        everything = Counter(path for rule in rules for path in rule.paths)
        self._partial = {path for path, count in self._missing.items() if count < everything[path]}
        self._shapes, self._place, self._old = shapes, place, old
        self._open: dict[ParamPath, npt.NDArray[Any]] = {}
        self._parts: dict[ParamPath, list[Part]] = {path: [] for path in self._partial}

    def opened(self, rule: LoadRule) -> Leaves:
        """The host arrays of the leaves that a rule fills."""
        for path in rule.paths:
            if path not in self._open:
                shape = self._shapes[path]
                leaf = self._open[path] = host_memory.zeros(shape.shape, shape.dtype)
                if path in self._partial:
                    assert self._old is not None, "only an update may be partial"
                    leaf[...] = self._old(path)
        return {path: self._open[path] for path in rule.paths}

    def placed(self, rule: LoadRule) -> None:
        """Notes that a rule's tensors are in its leaves, and places the leaves that are complete now."""
        for path in rule.paths:
            self._missing[path] -= 1
            if path in self._partial:
                self._parts[path] += rule.parts_of(path)
            if self._missing[path] == 0:
                value = self._place(path, self._open.pop(path))
                jax.block_until_ready(value)
                host_memory.let_go()  # if JAX has copied the host array, its memory is free now
                self.made[path] = NewLeaf(value, self._parts.get(path))


def _runs(rule: LoadRule) -> list[tuple[int, int]]:
    """The ranges of rows that one task fills each."""
    rows = _rows_of(rule, _TASK_VALUES)
    return [(begin, min(begin + rows, rule.num_rows)) for begin in range(0, rule.num_rows, rows)]


def _rows_of(rule: LoadRule, num_values: int) -> int:
    """A number of rows with about `num_values` values, in whole units of the rule."""
    return max(1, num_values // max(1, rule.row_size) // rule.unit) * rule.unit


def _fill(rule: LoadRule, tensors: Mapping[str, Tensor], leaves: Leaves, begin: int, end: int) -> list[str]:
    """Fills some rows of a rule. Returns the tensors with values that its dtype cannot hold."""
    too_large: list[str] = []
    step = _rows_of(rule, _STEP_VALUES)
    for first in range(begin, end, step):
        too_large += rule.fill(leaves, tensors, first, min(first + step, end))
    return too_large
