"""Makes the leaves of a model's state from a checkpoint's tensors, which may come in any order.

As soon as all tensors of a rule (`models.load_rules`) are there, threads fill its part of a leaf in host
memory; a leaf is handed over when it is complete, and a tensor is let go when all its rules have read it. So
beyond the leaves only the tensors of incomplete rules are held, and some rows for each thread.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.runtime.machine import host_memory
from penstock.runtime.machine.background import lower_priority
from penstock.runtime.models.load_rules import Leaves, LoadRule, ParamPath, Part, Tensor

_TASK_VALUES = 1 << 21
"""How many values of tensors one thread takes at a time."""
_STEP_VALUES = 1 << 19
"""How many values it converts at a time, so that intermediate values stay in its cache."""

Parts: TypeAlias = Sequence[Part] | None
"""The parts of a leaf that are new; None: all of it is new."""
TakeLeaf: TypeAlias = Callable[[ParamPath, npt.NDArray[Any], Parts], None]
"""Called with a complete leaf, which is never written again."""


class LeafShape(Protocol):
    """What must be known of a leaf to make it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


@dataclass(slots=True)
class _Waiting:
    """A rule, and the tensors that it has not got yet."""

    rule: LoadRule
    lacks: set[str]


class LeafMaker:
    """Makes the leaves of one checkpoint or update. Every method is called by one thread at a time; `take`
    and `done` are called on that thread.
    """

    def __init__(
        self,
        rules: Sequence[LoadRule],
        names: Collection[str],
        shapes: Mapping[ParamPath, LeafShape],
        take: TakeLeaf,
        *,
        threads: int,
        old: Callable[[ParamPath], npt.NDArray[Any]] | None = None,
        done: Callable[[LoadRule], None] = lambda rule: None,
        in_background: bool = False,
    ) -> None:
        """rules: all rules of the model. names: the tensors that will be added; their names, shapes and
        dtypes must have been checked. Rules without tensors are left out, and `old` gives the leaf that they
        would fill. threads: how many fill leaves, with low priority where `in_background`. done: called when
        a rule's tensors are in its leaves.
        """
        used = [rule for rule in rules if all(source.name in names for source in rule.sources)]
        self._rules = used
        self._readers: dict[str, list[_Waiting]] = {}
        for rule in used:
            waiting = _Waiting(rule, {source.name for source in rule.sources})
            for name in waiting.lacks:
                self._readers.setdefault(name, []).append(waiting)
        self._tensors: dict[str, Tensor] = {}
        self._unread: dict[str, int] = {}
        self._missing = Counter(path for rule in used for path in rule.paths)
        everything = Counter(path for rule in rules for path in rule.paths)
        self._parts: dict[ParamPath, list[Part]] = {
            path: [] for path, count in self._missing.items() if count < everything[path]
        }
        self._open: dict[ParamPath, npt.NDArray[Any]] = {}
        self._shapes, self._take, self._old, self._done = shapes, take, old, done
        self._ahead: deque[tuple[LoadRule, Future[list[str]], bool]] = deque()
        self._most_ahead = 2 * threads
        self._pool = ThreadPoolExecutor(
            threads, "penstock-weights", initializer=lower_priority if in_background else None
        )
        self.too_large: dict[str, np.dtype[np.generic]] = {}
        """Tensors with values beyond the range of a rule's dtype, and that dtype."""
        self.is_refused = False
        """Whether no more leaves are handed over, because something is wrong with a tensor. Those to come are
        still filled, to find all tensors with values beyond the range.
        """

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, of which the values may be read until the rules that need it are done. May block
        while others are converted. A tensor that no rule reads is not kept.
        """
        readers = self._readers.pop(name, [])
        if readers:
            self._tensors[name], self._unread[name] = tensor, len(readers)
        for waiting in readers:
            waiting.lacks.discard(name)
            if not waiting.lacks:
                self._start(waiting.rule)

    def add_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Take all tensors at once, such as those of files, which are not held in memory. Leaves are filled
        one after the other, so that few are open at a time.
        """
        for name, readers in self._readers.items():
            self._tensors[name], self._unread[name] = tensors[name], len(readers)
        self._readers.clear()
        first: dict[ParamPath, int] = {}
        for number, rule in enumerate(self._rules):
            first.setdefault(rule.targets[0].path, number)
        for rule in sorted(self._rules, key=lambda rule: first[rule.targets[0].path]):
            self._start(rule)

    def finish(self) -> None:
        """Wait until all leaves are complete. RuntimeError if one is not, because a tensor was not added or
        an earlier call raised.
        """
        while self._ahead:
            self._settle_one()
        if any(self._missing.values()):
            raise RuntimeError("not all leaves are complete")

    def close(self) -> None:
        """Stop, and let go of everything that is held. May be called twice."""
        self._pool.shutdown(cancel_futures=True)
        for held in (self._readers, self._tensors, self._open, self._ahead):
            held.clear()

    def _start(self, rule: LoadRule) -> None:
        """Have threads fill the leaves of a rule, all tensors of which are there."""
        names = {source.name for source in rule.sources}
        tensors = {name: self._tensors[name] for name in names}
        for name in names:
            self._unread[name] -= 1
            if not self._unread[name]:
                del self._tensors[name]
        leaves = {path: self._opened(path) for path in rule.paths}
        for begin, end in _runs(rule):
            if len(self._ahead) == self._most_ahead:
                self._settle_one()
            future = self._pool.submit(_fill, rule, tensors, leaves, begin, end)
            self._ahead.append((rule, future, end == rule.num_rows))

    def _opened(self, path: ParamPath) -> npt.NDArray[Any]:
        """Return the host array of a leaf that is being filled."""
        if path not in self._open:
            shape = self._shapes[path]
            leaf = self._open[path] = host_memory.zeros(shape.shape, shape.dtype)
            if path in self._parts:
                assert self._old is not None, "only an update may be partial"
                self._pool.submit(_copy, leaf, self._old(path)).result()
        return self._open[path]

    def _settle_one(self) -> None:
        rule, future, is_last = self._ahead.popleft()
        for name in future.result():
            self.too_large.setdefault(name, rule.dtype)
            self.is_refused = True
        if is_last:
            for path in rule.paths:
                self._filled(rule, path)
            self._done(rule)

    def _filled(self, rule: LoadRule, path: ParamPath) -> None:
        """Note that a rule's tensors are in a leaf, and hand the leaf over if it is complete now."""
        self._missing[path] -= 1
        if path in self._parts:
            self._parts[path] += rule.parts_of(path)
        if self._missing[path] == 0:
            leaf = self._open.pop(path)
            if not self.is_refused:
                self._take(path, leaf, self._parts.get(path))
            del leaf
            host_memory.let_go()  # if JAX has copied the host array, its memory is free now


def _copy(leaf: npt.NDArray[Any], old: npt.NDArray[Any]) -> None:
    leaf[...] = old


def _runs(rule: LoadRule) -> list[tuple[int, int]]:
    """Return the ranges of rows that one task fills each."""
    rows = _rows_of(rule, _TASK_VALUES)
    begins = range(0, rule.num_rows, rows)
    return list(itertools.pairwise([*begins, rule.num_rows]))


def _rows_of(rule: LoadRule, num_values: int) -> int:
    """Choose a number of rows with about `num_values` values, in whole units of the rule."""
    return max(1, num_values // max(1, rule.row_size) // rule.unit) * rule.unit


def _fill(rule: LoadRule, tensors: Mapping[str, Tensor], leaves: Leaves, begin: int, end: int) -> list[str]:
    """Fill some rows of a rule. Returns the tensors with values that its dtype cannot hold."""
    too_large: list[str] = []
    step = _rows_of(rule, _STEP_VALUES)
    for first in range(begin, end, step):
        too_large += rule.fill(leaves, tensors, first, min(first + step, end))
    return too_large
