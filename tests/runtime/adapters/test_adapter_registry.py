"""What happens to names of adapters while others are read. Reading one waits until the test lets it go on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.runtime.adapters.interface import AdapterTensors
from penstock.runtime.adapters.registry import AdapterRegistry
from penstock.runtime.engine import Engine
from penstock.runtime.errors import TooManyAdaptersError, UnknownAdapterError
from penstock.runtime.requests.adapter import AdapterValues, AdapterWeights
from penstock.runtime.requests.request import Request
from penstock.runtime.scheduling.adapter_slots import AdapterSlots
from penstock.runtime.sent_tensors import SentTensor


@dataclass(frozen=True)
class Options:
    adapter_dir: Path | None = None
    max_adapters: int = 2
    max_cached_adapters: int = 4


class Reading:
    """Reads adapters. Before each read, `begun` is released and `go` is awaited."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def check(self, config: Mapping[str, Any], tensors: Iterable[SentTensor]) -> None:
        """Find nothing wrong."""

    def read(self, source: Path | AdapterTensors) -> AdapterWeights:
        self.begun.release()
        assert self.go.acquire(timeout=60)
        content = source.name if isinstance(source, Path) else str(source.config["content"])
        return AdapterWeights(AdapterValues(1, 1, np.dtype(np.float32)), content.encode().hex(), 1, 1.0, ())


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def registry_of(read: Reading, options: Options) -> AdapterRegistry:
    return AdapterRegistry(options, read, AdapterSlots(options.max_adapters), lambda named, pinned: None)


def pushed(content: str) -> AdapterTensors:
    return AdapterTensors({"content": content}, ())


def test_two_that_are_pinned_at_once_leave_a_place_for_others(pool: ThreadPoolExecutor) -> None:
    read = Reading()
    registry = registry_of(read, Options())
    both = [pool.submit(registry.load, name, pushed(name), pinned=True) for name in ("a", "b")]
    for _ in both:
        assert read.begun.acquire(timeout=60)
    read.go.release(2)
    failures = [one.exception(60) for one in both]
    assert sorted(str(type(one).__name__) for one in failures) == ["NoneType", "TooManyAdaptersError"]
    (left,) = registry.list()
    assert registry.pin(left.name, True).is_pinned  # it was, and is
    read.go.release()
    with pytest.raises(TooManyAdaptersError):
        registry.load("c", pushed("c"), pinned=True)


def test_a_request_that_finds_its_adapter_loaded_meanwhile_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder was looked at when the name meant nothing; then other content was pushed under the name."""
    (tmp_path / "sql").mkdir()
    read = Reading()
    read.go.release(2)
    registry = registry_of(read, Options(tmp_path))
    find = registry._folder

    def folder(name: str) -> Path:
        found = find(name)
        threading.Thread(target=load).start()
        return found

    def load() -> None:
        registry.load("sql", pushed("other"), pinned=True)
        is_loaded.set()

    is_loaded = threading.Event()
    take = registry._load

    def loaded_first(*given: object, **options: object) -> object:
        if options["may_leave"]:
            assert is_loaded.wait(60)
        return take(*given, **options)  # type: ignore[arg-type]  # what the registry gives itself

    monkeypatch.setattr(registry, "_folder", folder)
    monkeypatch.setattr(registry, "_load", loaded_first)
    assert registry.weights_of("sql").digest == b"other".hex()
    (info,) = registry.list()
    assert (info.is_pinned, info.source) == (True, "pushed")


def test_a_slow_disk_keeps_nobody_from_what_is_in_memory(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    is_looking, may_go_on = threading.Event(), threading.Event()

    class SlowPath(type(tmp_path)):  # type: ignore[misc]  # the class of paths is only known when it runs
        def __truediv__(self, name: str) -> Path:
            is_looking.set()
            assert may_go_on.wait(60)
            return tmp_path / name

    registry = registry_of(Reading(), Options(SlowPath(tmp_path)))
    asked = pool.submit(registry.weights_of, "sql")
    assert is_looking.wait(60)
    assert pool.submit(registry.list).result(60) == ()
    may_go_on.set()
    assert isinstance(asked.exception(60), UnknownAdapterError)


def test_the_engine_is_told_of_names_and_pins_that_change() -> None:
    read, told = Reading(), list[tuple[frozenset[str], frozenset[str]]]()
    read.go.release(2)
    registry = AdapterRegistry(Options(), read, AdapterSlots(2), lambda *both: told.append(both))
    registry.load("a", pushed("a"))
    registry.load("b", pushed("b"), pinned=True)
    registry.pin("b", True)
    registry.unload("a")
    registry.unload("b")
    a, b = b"a".hex(), b"b".hex()
    known = [(set(named), set(pinned)) for named, pinned in told]
    assert known == [({a}, set()), ({a, b}, {b}), ({b}, {b}), (set(), set())]


def test_a_name_that_no_file_can_have_is_unknown(tmp_path: Path) -> None:
    """128 characters may be 256 bytes, one more than Linux's file systems take."""
    with pytest.raises(UnknownAdapterError):
        registry_of(Reading(), Options(tmp_path)).weights_of("é" * 128)


def test_weights_that_a_request_brings_are_not_looked_up_again() -> None:
    weights = AdapterWeights(AdapterValues(1, 1, np.dtype(np.float32)), "1a", 1, 1.0, ())
    request = Request("a", (1, 2), adapter="sql", adapter_weights=weights)
    engine = object.__new__(Engine)  # without adapters: it would find none
    assert engine._with_adapter(request).adapter_weights is weights
