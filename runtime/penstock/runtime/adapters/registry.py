"""AdapterRegistry: the adapters of an engine, by name. No jax.

An adapter is kept on the host from its load on. It goes to the device when the first request that names it
enters a step (`scheduling.adapter_slots`). A request has the weights that the name meant when it came, so
nothing that happens to the name later concerns it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from penstock.runtime.adapters.interface import (
    AdapterInfo,
    AdapterState,
    AdapterTensors,
    check_name,
)
from penstock.runtime.errors import (
    AdapterExistsError,
    TooManyAdaptersError,
    UnknownAdapterError,
    UnsupportedFeature,
)
from penstock.runtime.requests.adapter import AdapterWeights
from penstock.runtime.scheduling.adapter_slots import AdapterSlots
from penstock.runtime.sent_tensors import SentTensor


class Reader(Protocol):
    """Reads adapters and checks them against the model. Both raise AdapterFormatError."""

    def read(self, source: Path | AdapterTensors) -> AdapterWeights:
        """Read a whole adapter."""
        ...

    def check(self, config: Mapping[str, Any], tensors: Iterable[SentTensor]) -> None:
        """Check what an adapter's values need not be known for. config: what adapter_config.json holds."""
        ...


class Limits(Protocol):
    """What the registry reads of the engine's options."""

    @property
    def max_adapters(self) -> int: ...
    @property
    def max_cached_adapters(self) -> int: ...
    @property
    def adapter_dir(self) -> Path | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What one name means now."""

    weights: AdapterWeights
    source: str
    is_pinned: bool
    may_leave: bool
    """Whether it came from `adapter_dir`, so that it can be read again."""
    last_used_s: float


class AdapterRegistry:
    """Loads, lists and unloads adapters. Any thread may call it at any time; `load` blocks until the adapter
    can be named, the others only for a moment.
    """

    def __init__(
        self,
        limits: Limits,
        reader: Reader | None,
        slots: AdapterSlots,
        tell: Callable[[frozenset[str], frozenset[str]], None],
    ) -> None:
        """`reader` None: the engine has no adapters. `slots`: those of the device, which are only read here.
        `tell` is called with the digests of the adapters that a name means, and of those that keep their
        slots.
        """
        self._limits, self._reader, self._slots, self._tell = limits, reader, slots, tell
        self._entries: dict[str, _Entry] = {}
        self._loading: dict[str, str] = {}  # name to source, in order of their beginning
        self._told = frozenset[str](), frozenset[str]()  # what the scheduler knows
        self._num_evicted = 0
        self._lock = threading.Condition()

    @property
    def is_on(self) -> bool:
        """Whether the engine was made for adapters."""
        return self._reader is not None

    @property
    def evictions(self) -> Mapping[str, int]:
        """How often an adapter left the memory of the "device", and that of the "host", for another one,
        while a name meant it.
        """
        return {"device": self._slots.num_evicted, "host": self._num_evicted}

    def check(self, config: Mapping[str, Any], tensors: Iterable[SentTensor]) -> None:
        """Check an adapter whose values are still to come, so that nobody sends them in vain. config: what
        adapter_config.json holds. Raises AdapterFormatError, and UnsupportedFeature if the engine has no
        adapters.
        """
        if self._reader is None:
            raise self._off()
        self._reader.check(config, tensors)

    def load(
        self, name: str, source: Path | AdapterTensors, *, pinned: bool = False, replace: bool = False
    ) -> AdapterInfo:
        """Read an adapter, check it against the model and keep it on the host; it goes to the device when a
        request names it. The same content under the same name is loaded already, and changes nothing but
        `pinned`. With `replace` other content takes the name: outputs that run finish on the old weights.

        Raises InvalidRequest for a name that none can have, AdapterExistsError if the name has other content
        and `replace` is False, AdapterFormatError, TooManyAdaptersError if there is no place that another
        adapter could leave, and UnsupportedFeature if the engine has no adapters.
        """
        return self._load(name, source, pinned=pinned, replace=replace, may_leave=False)[1]

    def unload(self, name: str) -> None:
        """Take the name away. Outputs that run or wait finish on its weights, which are freed after them.
        Raises UnknownAdapterError.
        """
        with self._lock:
            self._entry(name)
            del self._entries[name]
            self._tell_scheduler()

    def pin(self, name: str, pinned: bool) -> AdapterInfo:
        """Say whether the adapter stays in memory while no output uses it. Raises UnknownAdapterError, and
        TooManyAdaptersError if all places on the device but one were pinned already.
        """
        with self._lock:
            entry = self._entry(name)
            if pinned:
                self._check_pin(name)
            self._entries[name] = replace(entry, is_pinned=pinned)
            self._tell_scheduler()
            return self._info(name)

    def list(self) -> tuple[AdapterInfo, ...]:
        """List all adapters that are in memory or being read, by name. Those of `adapter_dir` that nobody has
        named yet are not.
        """
        with self._lock:
            return tuple(self._info(name) for name in sorted(self._entries.keys() | self._loading.keys()))

    def get(self, name: str) -> AdapterInfo:
        """Return the adapter of this name, which is in memory. Raises UnknownAdapterError."""
        with self._lock:
            self._entry(name)
            return self._info(name)

    def weights_of(self, name: str) -> AdapterWeights:
        """Return what the name means now, for a request. An adapter in `adapter_dir` that is not in memory is
        read first, which blocks. Raises UnknownAdapterError and, for such an adapter, what `load` raises.
        """
        with self._lock:
            while name in self._loading and name not in self._entries:
                self._lock.wait()
            entry = self._entries.get(name)
            if entry is not None:
                self._entries[name] = replace(entry, last_used_s=time.time())
                return entry.weights
        folder = self._folder(name)  # a disk may be slow, and others only want to know what is there
        return self._load(name, folder, pinned=False, replace=False, may_leave=True)[0]

    def _folder(self, name: str) -> Path:
        """Tell where `adapter_dir` has an adapter of this name. UnknownAdapterError if it has none."""
        if self._reader is None:
            raise self._off()
        folder = self._limits.adapter_dir
        if folder is not None:
            check_name(name)
            if os.path.isdir(folder / name):  # also false for a name that is too long for a file
                return folder / name
        raise UnknownAdapterError(name)

    def _load(
        self, name: str, source: Path | AdapterTensors, *, pinned: bool, replace: bool, may_leave: bool
    ) -> tuple[AdapterWeights, AdapterInfo]:
        """Read an adapter. `may_leave`: a request has named it. Then nothing is read if the name has come
        meanwhile.
        """
        if self._reader is None:
            raise self._off()
        check_name(name)
        told = str(source) if isinstance(source, Path) else "pushed"
        with self._lock:
            while name in self._loading:
                self._lock.wait()
            if may_leave and name in self._entries:  # loaded by name, or by another request
                return self._entries[name].weights, self._info(name)
            if pinned:
                self._check_pin(name)
            self._loading[name] = told
        try:
            weights = self._reader.read(source)
            with self._lock:
                self._keep(name, weights, told, pinned=pinned, replace=replace, may_leave=may_leave)
                return self._entries[name].weights, self._info(name)
        finally:
            with self._lock:
                del self._loading[name]
                self._lock.notify_all()

    def _keep(
        self,
        name: str,
        weights: AdapterWeights,
        source: str,
        *,
        pinned: bool,
        replace: bool,
        may_leave: bool,
    ) -> None:
        before = self._entries.get(name)
        if before is not None and before.weights.digest == weights.digest:
            weights = before.weights
        elif before is not None and not replace:
            raise AdapterExistsError(name)
        if pinned:  # others may have been pinned while it was read
            self._check_pin(name)
        if before is None and len(self._entries) >= self._limits.max_cached_adapters:
            self._make_room()
        self._entries[name] = _Entry(
            weights=weights,
            source=source,
            is_pinned=pinned,
            may_leave=may_leave,
            last_used_s=time.time(),
        )
        self._tell_scheduler()

    def _make_room(self) -> None:
        """Forget the least recently used adapter that can be read again and that nobody uses."""
        leavers = [
            (entry.last_used_s, name)
            for name, entry in self._entries.items()
            if entry.may_leave and not entry.is_pinned and not self._slots.num_users(entry.weights.digest)
        ]
        if not leavers:
            raise TooManyAdaptersError(self._limits.max_cached_adapters)
        del self._entries[min(leavers)[1]]
        self._num_evicted += 1

    def _check_pin(self, name: str) -> None:
        """Refuse to pin this one too if no slot were left for adapters that are not pinned."""
        others = sum(entry.is_pinned for other, entry in self._entries.items() if other != name)
        if 1 + others >= self._limits.max_adapters:
            raise TooManyAdaptersError(self._limits.max_adapters)

    def _tell_scheduler(self) -> None:
        entries = self._entries.values()
        named = frozenset(entry.weights.digest for entry in entries)
        pinned = frozenset(entry.weights.digest for entry in entries if entry.is_pinned)
        if (named, pinned) != self._told:  # telling it takes the engine's lock
            self._tell(named, pinned)
            self._told = named, pinned

    def _entry(self, name: str) -> _Entry:
        if self._reader is None:
            raise self._off()
        if name not in self._entries:
            raise UnknownAdapterError(name)
        return self._entries[name]

    def _info(self, name: str) -> AdapterInfo:
        entry = self._entries.get(name)
        if entry is None:
            return AdapterInfo(
                name=name,
                digest="",
                rank=0,
                scaling=0.0,
                targets=(),
                num_bytes=0,
                state="loading",
                is_pinned=False,
                last_used_s=time.time(),
                num_running=0,
                source=self._loading[name],
            )
        weights = entry.weights
        state: AdapterState = "loaded" if self._slots.has(weights.digest) else "cached"
        return AdapterInfo(
            name=name,
            digest=weights.digest,
            rank=weights.rank,
            scaling=weights.scaling,
            targets=weights.targets,
            num_bytes=weights.values.num_bytes,
            state=state,
            is_pinned=entry.is_pinned,
            last_used_s=entry.last_used_s,
            num_running=self._slots.num_users(weights.digest),
            source=entry.source,
        )

    def _off(self) -> UnsupportedFeature:
        return UnsupportedFeature(("adapter",), "the server was started with max_adapters 0")
