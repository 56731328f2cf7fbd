"""The adapters of the fake engine: names and numbers without weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.runtime.adapters.interface import AdapterInfo, AdapterTensors, check_name
from penstock.runtime.errors import (
    AdapterExistsError,
    AdapterFormatError,
    TooManyAdaptersError,
    UnknownAdapterError,
    UnsupportedFeature,
)
from penstock.runtime.requests.adapter import AdapterValues, AdapterWeights
from penstock.runtime.sent_tensors import SentTensor

NOW_S = 1_700_000_000.0


class FakeAdapters:
    """Knows adapters by name. A directory holds a file `content`; what is pushed is known by its bytes."""

    def __init__(
        self, most: int, running: Callable[[str], int], most_cached: int = 64, folder: Path | None = None
    ) -> None:
        """`most`: on the device; 0: none at all. `running` counts the outputs on an adapter. `folder` has
        those that requests may name without a load.
        """
        self._folder = folder
        self._most, self._most_cached, self._running = most, most_cached, running
        self._lock = threading.Lock()
        self._known: dict[str, AdapterInfo] = {}
        self.loaded: dict[str, AdapterTensors | Path] = {}
        """What each was loaded from, by name."""
        self.evictions: Mapping[str, int] = {"device": 0, "host": 0}

    @property
    def is_on(self) -> bool:
        return self._most > 0

    def load(
        self, name: str, source: Path | AdapterTensors, *, pinned: bool = False, replace: bool = False
    ) -> AdapterInfo:
        self._check_on()
        check_name(name)
        rank = 8
        if isinstance(source, Path):
            try:
                content = (source / "content").read_bytes()
            except OSError as error:
                raise AdapterFormatError(f"{source} holds no adapter_config.json") from error
            shown = str(source)
        else:
            tensors = [(name, array) for name, array in source.tensors]
            source = AdapterTensors(source.config, tensors)
            content = json.dumps(source.config).encode() + b"".join(array.tobytes() for _, array in tensors)
            shown, rank = "pushed", source.config["r"]
        with self._lock:
            known = self._known.get(name)
            digest = hashlib.sha256(content).hexdigest()
            if known is not None and known.digest != digest and not replace:
                raise AdapterExistsError(name)
            if known is None and len(self._known) >= self._most_cached:
                raise TooManyAdaptersError(self._most_cached)
            self._known[name] = AdapterInfo(
                name=name,
                digest=digest,
                rank=rank,
                scaling=2.0,
                targets=("k_proj", "q_proj"),
                num_bytes=len(content),
                state="cached",
                is_pinned=pinned,
                last_used_s=NOW_S,
                num_running=0,
                source=shown,
            )
            self.loaded[name] = source
        return self.get(name)

    def check(self, config: Mapping[str, Any], tensors: Sequence[SentTensor]) -> None:
        if not isinstance(config.get("r"), int):
            raise AdapterFormatError("must be a whole number", field="r")

    def unload(self, name: str) -> None:
        self._check_on()
        with self._lock:
            if self._known.pop(name, None) is None:
                raise UnknownAdapterError(name)

    def pin(self, name: str, pinned: bool) -> AdapterInfo:
        info = self.get(name)
        with self._lock:
            self._known[name] = dataclasses.replace(info, is_pinned=pinned)
        return self.get(name)

    def list(self) -> tuple[AdapterInfo, ...]:
        with self._lock:
            known = [*self._known.values()]
        return tuple(
            dataclasses.replace(
                one,
                num_running=self._running(one.name),
                state="loaded" if index < self._most else "cached",
            )
            for index, one in enumerate(known)
        )

    def get(self, name: str) -> AdapterInfo:
        self._check_on()
        for info in self.list():
            if info.name == name:
                return info
        raise UnknownAdapterError(name)

    def weights_of(self, name: str) -> AdapterWeights:
        self._check_on()
        check_name(name)
        known = name in [info.name for info in self.list()]
        if not known and self._folder is not None and os.path.isdir(self._folder / name):
            self.load(name, self._folder / name)
        info = self.get(name)
        return AdapterWeights(
            AdapterValues(1, 0, np.dtype(np.float32)), info.digest, info.rank, info.scaling, info.targets
        )

    def _check_on(self) -> None:
        if not self.is_on:
            raise UnsupportedFeature(("adapter",), "the server was started with max_adapters 0")
