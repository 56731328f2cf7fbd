"""Where the leaves of an update go when they are complete: beside those that serve, or in their place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt

from penstock.runtime.errors import WeightsError
from penstock.runtime.execution.device.device_state import DeviceState
from penstock.runtime.host import host_memory
from penstock.runtime.loading.leaves import Parts
from penstock.runtime.models.load_rules import ParamPath

UseHugePages = Callable[[Sequence[jax.Array]], object]


class NewLeaves(Protocol):
    """Takes leaves on the update's thread, and makes them those that serve on the engine's."""

    def old(self, path: ParamPath) -> npt.NDArray[Any]:
        """The leaf that serves, to be copied where an update has only parts of it."""
        ...

    def take(self, path: ParamPath, leaf: npt.NDArray[Any], parts: Parts) -> None:
        """Takes a complete leaf, of which `parts` are new."""
        ...

    def install(self) -> None:
        """Makes all leaves those that serve; called between two steps. If it raises, nothing has changed,
        unless `break_weights` was called.
        """
        ...

    def drop(self) -> None:
        """Lets go of what is not installed, and of what was replaced. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class _Staged:
    """A leaf that waits, on the device or in host memory."""

    value: jax.Array | npt.NDArray[Any]
    parts: Parts


class LeavesBeside:
    """Leaves that wait beside those that serve until all are complete."""

    def __init__(
        self,
        device: DeviceState,
        *,
        on_device: bool,
        use_huge_pages: UseHugePages,
        break_weights: Callable[[str], None],
    ) -> None:
        """on_device: whether leaves are placed at once. break_weights: called with what failed if only some
        of the leaves could be replaced.
        """
        self._device, self._on_device = device, on_device
        self._use_huge_pages, self._break_weights = use_huge_pages, break_weights
        self._leaves: dict[ParamPath, _Staged] = {}
        self._seen: dict[ParamPath, weakref.ref[jax.Array]] = {}
        self._replaced: list[jax.Array] = []

    def old(self, path: ParamPath) -> npt.NDArray[Any]:
        """See `NewLeaves`."""
        leaf = self._device.leaves_by_path[path]
        self._seen[path] = weakref.ref(leaf)
        return np.asarray(leaf)

    def take(self, path: ParamPath, leaf: npt.NDArray[Any], parts: Parts) -> None:
        """See `NewLeaves`."""
        if not self._on_device:
            self._leaves[path] = _Staged(leaf, parts)
            return
        placed = _placed(self._device, path, leaf)
        self._use_huge_pages([placed])
        self._leaves[path] = _Staged(placed, parts)

    def install(self) -> None:
        """See `NewLeaves`. What was replaced is kept until `drop`, which takes time, if it lies in memory
        beside the new leaves anyway.
        """
        live = self._device.leaves_by_path
        new = {path: self._up_to_date(path, leaf, live[path]) for path, leaf in self._leaves.items()}
        self._leaves.clear()
        if self._on_device:
            self._device.replace_leaves(new)
            self._replaced = [live[path] for path in new]
            return
        # The largest leaf is the first, because once there was room for it there is room for all others.
        order = sorted(new, key=lambda path: live[path].nbytes, reverse=True)
        live.clear()
        for path in order:
            try:
                placed = _placed(self._device, path, np.asarray(new.pop(path)))
                self._device.replace_leaves({path: placed})
            except BaseException as error:
                if path != order[0]:
                    self._break_weights(str(error))
                raise

    def drop(self) -> None:
        """See `NewLeaves`."""
        self._leaves.clear()
        self._replaced.clear()
        host_memory.let_go()

    def _up_to_date(self, path: ParamPath, leaf: _Staged, live: jax.Array) -> jax.Array | npt.NDArray[Any]:
        """The leaf to install. Another update may have gone live since this one was staged, and what it
        changed must stay changed. So if only parts of the leaf are new, they are put into the live leaf. That
        is made on the host, because nothing may be compiled while requests run.
        """
        if leaf.parts is None or self._seen[path]() is live:
            return leaf.value
        merged = host_memory.zeros(live.shape, live.dtype)
        merged[...] = np.asarray(live)
        for part in leaf.parts:
            merged[part] = np.asarray(leaf.value)[part]
        return _placed(self._device, path, merged) if self._on_device else merged


class LeavesInPlace:
    """Leaves that replace the old ones at once, while the engine stands still. So the old leaf's memory is
    free before the next one is made.
    """

    def __init__(
        self, device: DeviceState, *, wait: Callable[[], None], use_huge_pages: UseHugePages
    ) -> None:
        """wait: called before a leaf is read or replaced; returns when the engine stands still."""
        self._device, self._wait, self._use_huge_pages = device, wait, use_huge_pages
        self.has_replaced = False
        """Whether some of the old weights are gone."""

    def old(self, path: ParamPath) -> npt.NDArray[Any]:
        """See `NewLeaves`."""
        self._wait()
        return np.asarray(self._device.leaves_by_path[path])

    def take(self, path: ParamPath, leaf: npt.NDArray[Any], parts: Parts) -> None:
        """See `NewLeaves`."""
        self._wait()
        value = _placed(self._device, path, leaf)
        self._use_huge_pages([value])
        self.has_replaced = True
        self._device.replace_leaves({path: value})

    def install(self) -> None:
        """All leaves are in their places already."""

    def drop(self) -> None:
        """Nothing waits."""


def _placed(device: DeviceState, path: ParamPath, leaf: npt.NDArray[Any]) -> jax.Array:
    """The leaf on the device. Raises WeightsError if there is no room for it."""
    try:
        placed: jax.Array = jax.block_until_ready(device.place(path, leaf))
        return placed
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        raise WeightsError(f"the leaf {path} could not be placed on the device: {error}") from error
