"""Updates in place: the engine stands still, and what was replaced before a failure cannot serve."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import pytest

from penstock.runtime import Engine
from penstock.runtime.errors import (
    ChecksumMismatch,
    DrainTimeout,
    GenerationChanged,
    InvalidRequest,
    TensorsRefused,
    WeightsError,
    WeightsIncomplete,
)
from penstock.runtime.loop.interface import InFlightPolicy, InFlightReport
from penstock.runtime.updating.interface import Staging, UpdateOutcome, UpdateReport
from penstock.runtime.updating.upload import Upload
from tests.support.collector import Collector, at_gate, submit
from tests.support.updating import Arrays, begun, bits, changed, described, options, send, tokens

pytestmark = pytest.mark.ci

IN_PLACE = Staging.IN_PLACE
UP = "model.layers.1.mlp.up_proj.weight"


def in_place(engine: Engine, tensors: Arrays, update_id: str = "in place", **changes: Any) -> Upload:
    return begun(engine, tensors, update_id, staging=IN_PLACE, **changes)


def is_ready(engine: Engine) -> bool:
    return engine.ready


def committed(engine: Engine, tensors: Arrays, **changes: Any) -> UpdateReport:
    upload = in_place(engine, tensors, **changes)
    try:
        return upload.commit(send(upload, tensors)).result(60)
    finally:
        upload.close()


def test_each_leaf_replaces_the_old_one_when_it_is_complete(
    fresh_engine: Callable[[], Engine], tensors: Arrays
) -> None:
    engine, other = fresh_engine(), fresh_engine()
    new = changed(tensors)
    device = engine.updater._device
    old = {path: weakref.ref(leaf) for path, leaf in device.leaves_by_path.items()}
    num_live = len(jax.live_arrays())
    upload = in_place(engine, new)
    total = 0
    for index in range(len(new)):
        total += send(upload, new, [index])
        assert len(jax.live_arrays()) <= num_live  # no second copy of any leaf
    report = upload.commit(total).result(60)
    upload.close()
    assert report.outcome is UpdateOutcome.COMMITTED
    assert (report.previous.generation, report.current.generation) == (1, 2)
    assert report.paused_s > 0
    assert all(leaf() is None for leaf in old.values())
    other.update_weights(new, label="new").result(60)
    assert bits(engine) == bits(other)
    assert tokens(engine) == tokens(other)


def test_the_engine_stands_still_until_the_commit(
    fresh_engine: Callable[[], Engine], tensors: Arrays
) -> None:
    engine = fresh_engine()
    gate, waiting = at_gate(engine, tokens=8), Collector()
    upload = in_place(engine, tensors, in_flight=InFlightPolicy.KEEP)
    gate.open()
    total = send(upload, tensors, range(len(tensors) - 1))
    submit(engine, waiting, "waiting", tokens=4)
    made = len(gate.sink.tokens("held"))
    total += send(upload, tensors, [len(tensors) - 1])
    assert len(gate.sink.tokens("held")) == made < 8
    assert not waiting.outputs
    report = upload.commit(total).result(60)
    upload.close()
    assert report.in_flight == InFlightReport(kept=1)
    gate.sink.last("held")
    waiting.last("waiting")
    generations = {output.weights_generation for output in waiting.outputs["waiting"]}
    assert generations == {2}


def test_an_update_that_ends_before_a_leaf_is_replaced_leaves_the_old_weights(
    engine: Engine, tensors: Arrays
) -> None:
    answer = tokens(engine)
    upload = in_place(engine, tensors)
    upload.write(0, 0, b"1234")
    upload.close()
    assert is_ready(engine)
    assert tokens(engine) == answer


@pytest.mark.parametrize("staging", [pytest.param(Staging.HOST, marks=pytest.mark.sweep), Staging.IN_PLACE])
def test_weights_that_are_partly_replaced_serve_nobody_until_a_whole_update(
    fresh_engine: Callable[[], Engine], tensors: Arrays, staging: Staging
) -> None:
    engine = fresh_engine()
    answer, before = tokens(engine), bits(engine)
    turns: list[bool] = []
    engine.on_ready_changed(lambda: turns.append(engine.ready))
    gate = at_gate(engine, tokens=8)
    upload = in_place(engine, changed(tensors), "spoils", in_flight=InFlightPolicy.KEEP)
    gate.open()
    send(upload, changed(tensors), range(len(tensors) - 1))
    upload.close()
    upload.close()
    assert not is_ready(engine)
    assert isinstance(gate.sink.last("held").error, WeightsIncomplete)
    with pytest.raises(WeightsIncomplete):
        submit(engine, Collector(), "refused")
    some = {UP: tensors[UP]}
    for partial in (lambda: begun(engine, some, "some", partial=True), lambda: validated(engine, some)):
        with pytest.raises(WeightsIncomplete):
            partial()
    with pytest.raises(WeightsIncomplete):
        engine.update_weights(some, label="some", partial=True)
    upload = begun(engine, tensors, "whole", staging=staging)
    upload.commit(send(upload, tensors)).result(60)
    upload.close()
    assert is_ready(engine)
    assert turns == [False, True]
    assert bits(engine) == before
    assert tokens(engine) == answer


def test_some_tensors_do_not_mend_weights_that_break_before_the_engine_stands_still(
    fresh_engine: Callable[[], Engine], tensors: Arrays
) -> None:
    engine = fresh_engine()
    some = {UP: tensors[UP]}
    gate = at_gate(engine, tokens=8)
    upload = in_place(engine, some, partial=True)  # waits for the request that runs
    engine.updater._core.changes.break_weights("another update failed")
    gate.open()
    with pytest.raises(WeightsIncomplete):
        upload.commit(send(upload, some))
    upload.close()
    assert not is_ready(engine)
    committed(engine, tensors, update_id="whole")
    assert is_ready(engine)


def validated(engine: Engine, tensors: Arrays) -> None:
    engine.updater.validate(options(partial=True), described(tensors))


@pytest.mark.parametrize("failure", ["damaged", "incomplete", "not finite", "wrong total"])
def test_a_bad_tensor_leaves_weights_that_cannot_serve(
    fresh_engine: Callable[[], Engine], tensors: Arrays, failure: str
) -> None:
    engine = fresh_engine()
    bad = {name: np.array(tensor) for name, tensor in changed(tensors).items()}
    last = list(bad)[-1]
    sent = described(bad, checksums=True)
    expected: type[Exception] = TensorsRefused
    if failure == "damaged":
        bad[last].flat[0] += 1
        expected = ChecksumMismatch
    if failure == "not finite":
        bad[last].flat[0] = np.nan
        sent = described(bad)
    upload = engine.updater.begin(options(staging=IN_PLACE, refuse_non_finite=True), sent)
    total = send(upload, bad, range(len(bad) - (failure == "incomplete")))
    if failure == "wrong total":
        total, expected = total + 1, InvalidRequest
    with pytest.raises(expected):
        upload.commit(total)
    upload.close()
    assert not is_ready(engine)
    committed(engine, tensors)
    assert is_ready(engine)


def test_a_first_tensor_that_is_bad_has_replaced_nothing(engine: Engine, tensors: Arrays) -> None:
    bad = {UP: np.array(tensors[UP])}
    sent = described(bad, checksums=True)
    bad[UP][0, 0] += 1
    upload = engine.updater.begin(options(staging=IN_PLACE, partial=True), sent)
    with pytest.raises(ChecksumMismatch):
        upload.commit(send(upload, bad))
    upload.close()
    assert is_ready(engine)


def test_parts_of_leaves_are_replaced_in_place(engine: Engine, tensors: Arrays) -> None:
    before = bits(engine)
    committed(engine, {UP: -tensors[UP]}, partial=True, update_id="there")
    assert bits(engine) != before
    committed(engine, {UP: tensors[UP]}, partial=True, update_id="and back")
    assert bits(engine) == before


def test_in_place_cannot_be_staged(engine: Engine, tensors: Arrays) -> None:
    with pytest.raises(InvalidRequest, match=r"begin\.staging"):
        in_place(engine, tensors, stage_only=True)
    upload = in_place(engine, {}, partial=True)
    with pytest.raises(InvalidRequest, match=r"begin\.staging"):
        upload.stage(0)
    upload.close()
    assert is_ready(engine)


class Elsewhere:
    """A call on another thread, and the error that it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001  the test looks at it
            self.error = error

    def ends(self) -> BaseException | None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.error


def test_begin_does_not_wait_and_writing_waits_so_long_as_it_is_told(engine: Engine, tensors: Arrays) -> None:
    gate = at_gate(engine, tokens=60)
    try:
        upload = in_place(engine, tensors, drain_timeout_s=0.0)
        writing = Elsewhere(lambda: send(upload, tensors))
        gate.open()
        assert isinstance(writing.ends(), DrainTimeout)
        upload.close()
        gate.sink.last("held")
        begun(engine, tensors, "next").close()
    finally:
        gate.open()


@pytest.mark.parametrize("what", ["write", "commit"])
def test_closing_ends_a_wait_for_the_engine(engine: Engine, tensors: Arrays, what: str) -> None:
    gate = at_gate(engine, tokens=8)
    try:
        if what == "write":
            upload = in_place(engine, tensors)
            waiting = Elsewhere(lambda: send(upload, tensors))
        else:
            upload = in_place(engine, {}, partial=True)
            waiting = Elsewhere(lambda: upload.commit(0))
        upload.close()
        error = waiting.ends()
        assert isinstance(error, WeightsError | RuntimeError)  # the second, if it was closed before
    finally:
        gate.open()
    gate.sink.last("held")
    begun(engine, tensors, "next").close()


def test_arrays_are_staged_while_an_upload_waits_for_the_engine(engine: Engine, tensors: Arrays) -> None:
    gate = at_gate(engine, tokens=8)
    try:
        upload = in_place(engine, tensors)
        waiting = Elsewhere(lambda: send(upload, tensors))
        pending: list[Future[UpdateReport]] = []
        staging = Elsewhere(lambda: pending.append(engine.update_weights(tensors, label="arrays")))
        assert staging.ends() is None
        upload.close()
        assert isinstance(waiting.ends(), WeightsError | RuntimeError)
    finally:
        gate.open()
    assert pending[0].result(60).current.label == "arrays"


def test_closing_when_the_engine_stands_still_lets_it_go_on(engine: Engine, tensors: Arrays) -> None:
    upload = in_place(engine, tensors)
    deadline = time.monotonic() + 60
    while not engine.changes._between.stands_still:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    upload.close()
    assert tokens(engine)


def test_a_generation_that_changes_before_the_engine_stands_still(engine: Engine, tensors: Arrays) -> None:
    now = engine.weights.generation
    gate = at_gate(engine, tokens=8)
    overtakes = engine.update_weights(tensors, label="overtakes")
    upload = in_place(engine, tensors, expected_generation=now)
    gate.open()
    overtakes.result(60)
    with pytest.raises(GenerationChanged) as refused:
        send(upload, tensors)
    assert (refused.value.expected, refused.value.current) == (now, now + 1)
    upload.close()
    assert tokens(engine)  # it does not stand still
