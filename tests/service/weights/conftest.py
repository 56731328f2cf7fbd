"""What the tests of weight updates share; see `tests.service.weights.fleet`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from penstock.runtime.engine import Engine
from penstock.runtime.ops.native import library
from tests.service.rig import WAIT_S, Kept
from tests.service.weights.fleet import SEEDS, Version, loaded
from tests.support.models.tiny import tiny_tensors, write_tiny


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Version]:
    found = {}
    for label, seed in SEEDS.items():
        tensors = tiny_tensors(seed)
        found[label] = Version(tensors, write_tiny(tmp_path_factory.mktemp(label), tensors))
    return found


@pytest.fixture(scope="module")  # no longer: engines that run change the process for tests of other folders
def references(versions: Mapping[str, Version]) -> Iterator[Mapping[str, Any]]:
    """Yield an engine for each version, which never sees an update."""
    if not library.available():
        pytest.skip("without native kernels the bits of a token depend on what else runs")
    engines = {label: loaded(version.directory) for label, version in versions.items()}
    assert all(engine.info.batch_invariant for engine in engines.values())
    yield {label: Kept(engine) for label, engine in engines.items()}
    for engine in engines.values():
        assert engine.weights.generation == 1
        engine.shutdown()


@pytest.fixture(scope="module")
def subjects() -> Iterator[list[Engine]]:
    """Yield the engine that tests of this module have updated so far, if there is one."""
    kept: list[Engine] = []
    yield kept
    for engine in kept:
        engine.shutdown()


@pytest.fixture
def subject(versions: Mapping[str, Version], subjects: list[Engine]) -> Iterator[Engine]:
    """Yield the engine whose weights are updated. They are those of "initial", of whatever generation."""
    if not subjects:
        subjects.append(loaded(versions["initial"].directory))
    (engine,) = subjects
    if engine.weights.label != "initial":
        engine.update_weights(versions["initial"].tensors, label="initial").result(WAIT_S)
    yield engine
    load = engine.load()
    is_idle = (load.num_running, load.num_waiting, load.pages_used) == (0, 0, 0)
    if not (is_idle and engine.ready and not engine.changes.is_paused):
        subjects.remove(engine)
        engine.shutdown()
    assert engine.compiles_after_warmup == 0
