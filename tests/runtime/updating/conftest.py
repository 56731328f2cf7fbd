"""Engines of small checkpoints. Tests must leave the weights of the shared one unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.runtime import Engine
from tests.support.updating import Arrays, bits, small_engine, tensors_of

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    """Return the folder of a checkpoint whose head is not tied."""
    return GOLDEN / "qwen2"


@pytest.fixture(scope="session")
def tensors(golden: Path) -> Arrays:
    """Return the checkpoint's tensors by name."""
    return tensors_of(golden)


@pytest.fixture(scope="module")
def shared_engine(golden: Path) -> Iterator[Engine]:
    engine = small_engine(golden)
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """Yield an engine that tests share, whose weights a test must leave unchanged."""
    before = bits(shared_engine)
    yield shared_engine
    assert bits(shared_engine) == before
    assert shared_engine.ready


@pytest.fixture
def fresh_engine(golden: Path) -> Iterator[Callable[[], Engine]]:
    """Yield a function that makes an engine for one test."""
    made: list[Engine] = []

    def make() -> Engine:
        made.append(small_engine(golden))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()
