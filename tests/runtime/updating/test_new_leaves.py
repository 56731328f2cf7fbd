"""Leaves that wait in host memory, as for a device with memory of its own, and what happens if they do not
fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from penstock.runtime import Engine, EngineConfig
from penstock.runtime.errors import WeightsError, WeightsIncomplete
from penstock.runtime.execution.device_state import DeviceState
from penstock.runtime.loading.served_model import load_model
from penstock.runtime.updating.interface import Staging, UpdateOutcome
from tests.support.collector import at_gate
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.models.toy import toy_backend
from tests.support.updating import Arrays, begun, bits, changed, send, tokens

UP = "model.layers.1.mlp.up_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def engine(golden: Path) -> Iterator[Engine]:
    """Yield an engine that takes its device's memory for another than the host's."""
    config = EngineConfig(
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=64,
        max_decode_steps=1,
        compilation_cache=TEST_CACHE,
        show_progress=False,
    )
    backend = dataclasses.replace(toy_backend(config), host_memory="unpinned_host")
    engine = Engine(load_model(str(golden), config, backend), config, backend=backend)
    engine.start()
    yield engine
    engine.shutdown()


class Placed(list[Any]):
    """The paths of leaves, as they are placed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_live: list[int] = []
        """How many arrays of JAX there were before each."""


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Placed:
    paths, place = Placed(), DeviceState.place

    def note(device: DeviceState, path: Any, leaf: Any) -> jax.Array:
        paths.append(path)
        paths.num_live.append(len(jax.live_arrays()))
        return place(device, path, leaf)

    monkeypatch.setattr(DeviceState, "place", note)
    return paths


@pytest.mark.parametrize("staging", [pytest.param(Staging.HOST, marks=pytest.mark.ci), Staging.DEVICE])
def test_leaves_are_placed_when_they_are_complete_or_when_they_go_live(
    engine: Engine, tensors: Arrays, placed: Placed, staging: Staging
) -> None:
    new, before = changed(tensors), bits(engine)
    gate = at_gate(engine, tokens=8)
    num_live = len(jax.live_arrays())
    upload = begun(engine, new, staging=staging)
    total = send(upload, new)
    pending = upload.commit(total)
    num_leaves = len(engine.updater._device.leaves)
    assert len(placed) == (num_leaves if staging is Staging.DEVICE else 0)
    gate.open()
    assert pending.result(60).outcome is UpdateOutcome.COMMITTED
    upload.close()
    assert len(placed) == num_leaves
    if staging is Staging.HOST:  # the largest first: if there is room for it, there is for the others
        assert max(placed.num_live) <= num_live, "each old leaf goes before the next new one comes"
        sizes = {path: leaf.nbytes for path, leaf in engine.updater._device.leaves_by_path.items()}
        assert [sizes[path] for path in placed] == sorted(sizes.values(), reverse=True)
    found, answer = bits(engine), tokens(engine)
    assert found != before
    engine.update_weights(new, label="by another way").result(60)
    assert (bits(engine), tokens(engine)) == (found, answer)


def test_parts_of_a_leaf_are_put_into_the_live_one(engine: Engine, tensors: Arrays) -> None:
    """Another update goes live between the begin of this one and its end."""
    upload = begun(engine, {UP: -tensors[UP]}, partial=True)
    total = send(upload, {UP: -tensors[UP]})
    engine.update_weights({GATE: -tensors[GATE]}, label="between", partial=True).result(60)
    upload.commit(total).result(60)
    upload.close()
    found = bits(engine)
    engine.update_weights({**tensors, UP: -tensors[UP], GATE: -tensors[GATE]}, label="both").result(60)
    assert bits(engine) == found


@pytest.mark.parametrize(
    ("at", "is_staged"),
    [pytest.param(0, True, marks=pytest.mark.ci), (1, False), pytest.param(5, False, marks=pytest.mark.ci)],
)
def test_a_leaf_that_does_not_fit(
    engine: Engine, tensors: Arrays, monkeypatch: pytest.MonkeyPatch, at: int, is_staged: bool
) -> None:
    """If it is the first, nothing has changed; after that, the weights cannot serve until a whole update. An
    update that was staged is gone.
    """
    before, answer = bits(engine), tokens(engine)
    place, count = DeviceState.place, iter(range(1000))

    def full(device: DeviceState, path: Any, leaf: Any) -> jax.Array:
        if next(count) == at:
            raise MemoryError("the device is full")
        return place(device, path, leaf)

    new = changed(tensors)
    upload = begun(engine, new, "u", stage_only=is_staged)
    total = send(upload, new)
    if is_staged:
        upload.stage(total)
    monkeypatch.setattr(DeviceState, "place", full)
    pending = engine.updater.commit_staged("u") if is_staged else upload.commit(total)
    with pytest.raises(WeightsError, match="could not be placed on the device: the device is full"):
        pending.result(60)
    assert engine.updater.staged_update_id == ""
    upload.close()
    if at == 0:
        assert bits(engine) == before
        assert tokens(engine) == answer
        return
    with pytest.raises(WeightsIncomplete, match="could not be placed on the device"):
        tokens(engine)
    engine.update_weights(tensors, label="whole").result(60)
    assert bits(engine) == before
    assert tokens(engine) == answer


def test_an_upload_whose_leaves_do_not_fit_beside_the_old_ones(
    engine: Engine, tensors: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With staging on the device. The upload has failed, and the old weights serve on."""
    before = bits(engine)
    place, count = DeviceState.place, iter(range(1000))

    def full(device: DeviceState, path: Any, leaf: Any) -> jax.Array:
        if next(count) == 3:
            raise MemoryError("the device is full")
        return place(device, path, leaf)

    monkeypatch.setattr(DeviceState, "place", full)
    upload = begun(engine, tensors, staging=Staging.DEVICE)
    num_live = len(jax.live_arrays())

    def all_of_it() -> None:
        upload.commit(send(upload, tensors))

    with pytest.raises(WeightsError, match="could not be placed on the device: the device is full"):
        all_of_it()
    upload.close()
    assert len(jax.live_arrays()) <= num_live
    assert bits(engine) == before
    assert np.asarray(tokens(engine)).size
