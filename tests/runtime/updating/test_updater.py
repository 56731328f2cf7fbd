"""One update at a time: ids, generations, staging, what is taken back, and what a shutdown leaves."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import jax
import numpy as np
import pytest

from penstock.runtime import Engine
from penstock.runtime.errors import (
    Draining,
    DrainTimeout,
    GenerationChanged,
    InvalidRequest,
    UnknownUpdate,
    UnsupportedFeature,
    UpdateUnderWay,
)
from penstock.runtime.loop.interface import InFlightPolicy, InFlightReport
from penstock.runtime.updating import updater as updater_module
from penstock.runtime.updating.interface import Staging, UpdateOutcome, UpdateReport
from penstock.runtime.updating.update import OneUpdate
from penstock.runtime.updating.upload import Upload
from tests.support.collector import Gate, at_gate
from tests.support.models.toy import toy_engine, toy_model
from tests.support.updating import Arrays, begun, bits, changed, described, options, send, tokens


def committed(engine: Engine, tensors: Arrays, update_id: str, **changes: object) -> UpdateReport:
    upload = begun(engine, tensors, update_id, **changes)
    try:
        return upload.commit(send(upload, tensors)).result(60)
    finally:
        upload.close()


def staged(engine: Engine, tensors: Arrays, update_id: str, **changes: object) -> UpdateReport:
    upload = begun(engine, tensors, update_id, stage_only=True, **changes)
    try:
        return upload.stage(send(upload, tensors))
    finally:
        upload.close()


def test_a_second_update_is_refused_while_one_is_under_way_or_staged(engine: Engine, tensors: Arrays) -> None:
    first = begun(engine, tensors, "first")
    for second in ("second", "first"):
        with pytest.raises(UpdateUnderWay, match="'first' is under way") as refused:
            begun(engine, tensors, second)
        assert (refused.value.update_id, refused.value.staged) == ("first", False)
    engine.updater.validate(options("third"), described(tensors))  # takes no place
    first.stage(send(first, tensors))
    first.close()
    with pytest.raises(UpdateUnderWay, match="'first' is staged") as refused:
        begun(engine, tensors, "second")
    assert refused.value.staged
    engine.update_weights(tensors, label="of the program").result(60)  # has no place, and so frees none
    with pytest.raises(UpdateUnderWay, match="'first' is staged"):
        begun(engine, tensors, "second")
    assert engine.updater.discard("first")
    begun(engine, tensors, "second").close()


def test_an_id_that_went_live_is_known(engine: Engine, tensors: Arrays) -> None:
    updater = engine.updater
    assert updater.already_committed("known") is None
    report = committed(engine, changed(tensors), "known")
    back = committed(engine, tensors, "back")
    again = updater.already_committed("known")
    assert again is not None
    assert again.outcome is UpdateOutcome.ALREADY_COMMITTED
    assert again.current == again.previous == back.current == engine.weights
    assert (again.digest, again.num_bytes) == (report.digest, report.num_bytes)
    assert updater.digest == back.digest != report.digest
    with pytest.raises(UpdateUnderWay) as refused:
        begun(engine, tensors, "known")  # for who asked just before it went live
    assert (refused.value.update_id, refused.value.staged) == ("known", False)
    with pytest.raises(UnknownUpdate):
        updater.commit_staged("unknown")
    first = begun(engine, tensors, "first")
    with pytest.raises(UpdateUnderWay):
        updater.commit_staged("first")
    assert not updater.discard("first")
    first.close()
    assert updater.commit_staged("known").result(60) == again


def test_who_is_told_that_an_update_is_live_may_begin_the_next_one(
    engine: Engine, tensors: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of an update is freed after it went live. Until then it has the place, and is not known."""
    updater, is_dropping, may_drop = engine.updater, threading.Event(), threading.Event()
    drop = OneUpdate.drop

    def slow_drop(update: OneUpdate) -> None:
        is_dropping.set()
        assert may_drop.wait(60)
        drop(update)

    monkeypatch.setattr(OneUpdate, "drop", slow_drop)
    upload = begun(engine, tensors, "slow to end")
    try:
        pending = upload.commit(send(upload, tensors))
        assert is_dropping.wait(60)
        assert updater.already_committed("slow to end") is None
        with pytest.raises(UpdateUnderWay, match="'slow to end' is under way"):
            begun(engine, tensors, "next one")
    finally:
        may_drop.set()
    pending.result(60)
    report = updater.already_committed("slow to end")
    assert report is not None
    assert report.outcome is UpdateOutcome.ALREADY_COMMITTED
    begun(engine, tensors, "next one").close()


def test_the_last_thousand_ids_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 20 in place of the thousand, so that the test need not make as many updates."""
    assert updater_module._MOST_REMEMBERED == 1000
    monkeypatch.setattr(updater_module, "_MOST_REMEMBERED", 20)
    engine = toy_engine()
    try:
        one = {"offset": np.ones((1,), np.float32)}
        for i in range(22):
            committed(engine, one, f"update {i}", in_flight=InFlightPolicy.KEEP)
        known = [engine.updater.already_committed(f"update {i}") is not None for i in range(22)]
        assert known == [False] * 2 + [True] * 20
        assert engine.weights.generation == 23
    finally:
        engine.shutdown()


def test_the_generation_is_compared_when_the_update_begins_and_when_it_goes_live(
    engine: Engine, tensors: Arrays
) -> None:
    before, now = bits(engine), engine.weights.generation
    for expected in (now - 1, now + 1):
        with pytest.raises(GenerationChanged) as refused:
            begun(engine, tensors, "stale", expected_generation=expected)
        assert (refused.value.expected, refused.value.current) == (expected, now)
        with pytest.raises(GenerationChanged):
            engine.updater.validate(options(expected_generation=expected), described(tensors))
    engine.updater.validate(options(expected_generation=now), described(tensors))
    upload = begun(engine, changed(tensors), "overtaken", expected_generation=now)
    total = send(upload, changed(tensors))
    engine.update_weights(tensors, label="overtakes").result(60)
    with pytest.raises(GenerationChanged) as refused:
        upload.commit(total).result(60)
    assert (refused.value.expected, refused.value.current) == (now, now + 1)
    upload.close()
    assert bits(engine) == before
    committed(engine, tensors, "in time", expected_generation=now + 1)


def test_a_staged_update_waits_and_goes_live(engine: Engine, tensors: Arrays) -> None:
    updater, before, serving = engine.updater, bits(engine), engine.weights
    report = staged(engine, changed(tensors), "staged")
    assert report.outcome is UpdateOutcome.STAGED
    assert report.current == report.previous == serving
    assert updater.staged_update_id == "staged"
    assert updater.already_committed("staged") == report
    assert bits(engine) == before
    with pytest.raises(UnknownUpdate):
        updater.commit_staged("another")
    live = updater.commit_staged("staged", in_flight=InFlightPolicy.KEEP).result(60)
    assert live.outcome is UpdateOutcome.COMMITTED
    assert live.previous == serving
    assert live.current == engine.weights
    assert live.digest == report.digest == updater.digest
    assert updater.staged_update_id == ""
    assert bits(engine) != before
    committed(engine, tensors, "back to the old")


def test_a_staged_update_can_be_discarded(engine: Engine, tensors: Arrays) -> None:
    num_live = len(jax.live_arrays())
    assert not engine.updater.discard("")
    staged(engine, changed(tensors), "discarded")
    assert len(jax.live_arrays()) > num_live
    assert not engine.updater.discard("another")
    assert engine.updater.discard("discarded")
    assert len(jax.live_arrays()) == num_live
    assert not engine.updater.discard("discarded")
    assert engine.updater.staged_update_id == ""


def test_a_commit_that_fails_leaves_the_update_staged(engine: Engine, tensors: Arrays) -> None:
    staged(engine, tensors, "persistent")
    gate = at_gate(engine, tokens=8)
    late = engine.updater.commit_staged("persistent", drain_timeout_s=0.01)
    taken_back = None
    gate_opened = False
    try:
        # The engine's thread is held, so it notices the time only when it goes on.
        assert engine.updater.staged_update_id == ""
        # Who has lost the first answer, and asks again, must not take it for an unknown update.
        with pytest.raises(UpdateUnderWay) as refused:
            engine.updater.commit_staged("persistent")
        assert (refused.value.update_id, refused.value.staged) == ("persistent", False)
        assert not engine.updater.discard("persistent")
        assert late.cancel()
        assert late.cancelled()
        assert engine.updater.staged_update_id == "persistent"
        taken_back = engine.updater.commit_staged("persistent")
        gate.open()
        gate_opened = True
        report = taken_back.result(60)
        assert report.in_flight == InFlightReport(waited=1)
    finally:
        if not gate_opened:
            gate.open()


def test_a_time_for_a_policy_that_does_not_wait_is_refused(engine: Engine, tensors: Arrays) -> None:
    """The policy may be that of the begin, so only the updater can tell."""
    staged(engine, tensors, "hurried", in_flight=InFlightPolicy.KEEP)
    with pytest.raises(InvalidRequest, match=r"drain_timeout: .* does not wait"):
        engine.updater.commit_staged("hurried", drain_timeout_s=1.0)
    assert engine.updater.staged_update_id == "hurried"
    engine.updater.commit_staged("hurried", in_flight=InFlightPolicy.WAIT, drain_timeout_s=60.0).result(60)


@pytest.mark.ci
def test_who_would_not_wait_so_long_is_told_and_the_update_stays_staged() -> None:
    """The engine's thread is held for longer than that, and then has a request that still runs."""
    engine = toy_engine()

    def hears_late(pending: Future[UpdateReport], gate: Gate) -> None:
        time.sleep(0.1)
        gate.open()
        with pytest.raises(DrainTimeout):
            pending.result(60)
        gate.sink.last("held")

    try:
        five = {"offset": np.full((1,), 5, np.float32)}
        staged(engine, five, "patient")
        gate = at_gate(engine, tokens=100)
        hears_late(engine.updater.commit_staged("patient", drain_timeout_s=0.05), gate)
        assert engine.updater.staged_update_id == "patient"
        assert engine.weights.generation == 1
        gate = at_gate(engine, tokens=100)
        aborting = engine.updater.commit_staged("patient", in_flight=InFlightPolicy.ABORT)
        gate.open()
        assert aborting.result(60).in_flight == InFlightReport(aborted=1)
        upload = begun(engine, five, "impatient", drain_timeout_s=0.05)
        gate = at_gate(engine, tokens=100)
        hears_late(upload.commit(send(upload, five)), gate)
        upload.close()
        begun(engine, five, "next").close()  # the place is free
    finally:
        engine.shutdown()


@pytest.mark.parametrize("by", ["cancel", "close"])
def test_an_upload_that_is_taken_back_frees_its_place_and_memory(
    engine: Engine, tensors: Arrays, by: str
) -> None:
    gate = at_gate(engine, tokens=8)
    try:
        num_live = len(jax.live_arrays())
        upload = begun(engine, changed(tensors), "taken back")
        pending = upload.commit(send(upload, changed(tensors)))
        with pytest.raises(UpdateUnderWay):
            begun(engine, tensors, "next")
        assert not pending.done()
        if by == "cancel":
            assert pending.cancel()
        else:
            upload.close()
        assert pending.cancelled()
        assert wait([pending], timeout=60).done == {pending}, "who waits is told"
        upload.close()
        assert len(jax.live_arrays()) == num_live
        begun(engine, tensors, "next").close()
    finally:
        gate.open()
    gate.sink.last("held")
    assert engine.updater.already_committed("taken back") is None


def test_an_update_whose_turn_has_come_cannot_be_taken_back(engine: Engine, tensors: Arrays) -> None:
    upload = begun(engine, tensors, "done")
    pending = upload.commit(send(upload, tensors))
    pending.result(60)
    assert not pending.cancel()
    assert not pending.cancelled()
    upload.close()


@pytest.mark.parametrize("staging", [Staging.HOST, Staging.DEVICE])
def test_memory_is_free_when_the_update_is_told(engine: Engine, tensors: Arrays, staging: Staging) -> None:
    num_live = len(jax.live_arrays())
    committed(engine, changed(tensors), f"new {staging}", staging=staging)
    assert len(jax.live_arrays()) == num_live
    committed(engine, tensors, f"old {staging}", staging=staging)
    assert len(jax.live_arrays()) == num_live


def test_a_model_without_rules_takes_no_updates() -> None:
    engine = toy_engine(dataclasses.replace(toy_model(), rules=None))
    try:
        with pytest.raises(UnsupportedFeature):
            engine.updater.begin(options(), [])
        assert engine.tensor_specs() == []
    finally:
        engine.shutdown()


@pytest.mark.parametrize("when", ["uploading", "staged", "pending"])
def test_a_shutdown_leaves_nothing(fresh_engine: Callable[[], Engine], tensors: Arrays, when: str) -> None:
    num_live = len(jax.live_arrays())
    engine = fresh_engine()
    gate = at_gate(engine, tokens=8)
    upload: Upload = begun(engine, changed(tensors), "u", stage_only=when == "staged")
    total = send(upload, changed(tensors))
    pending = upload.commit(total) if when == "pending" else None
    if when == "staged":
        upload.stage(total)
    gate.open()
    engine.shutdown()
    upload.close()
    if pending is not None:
        with pytest.raises(Draining):
            pending.result(60)
        assert not pending.cancelled()
    with pytest.raises(Draining):
        begun(engine, tensors, "late")
    assert len(jax.live_arrays()) == num_live


def test_answers_after_an_update_are_those_of_the_new_weights(
    fresh_engine: Callable[[], Engine], tensors: Arrays
) -> None:
    """Also with a prompt whose prefix is cached: the cache of the old weights is forgotten."""
    engine, other = fresh_engine(), fresh_engine()
    before = tokens(engine)
    new = {name: np.roll(tensor, 1) for name, tensor in tensors.items()}
    committed(engine, new, "rolled")
    other.update_weights(new, label="rolled").result(60)
    after = tokens(engine)
    assert after == tokens(other) != before
    committed(engine, tensors, "back")
    assert tokens(engine) == before


def test_times_are_told(engine: Engine, tensors: Arrays) -> None:
    begin = time.monotonic()
    upload = begun(engine, tensors, "timed")
    total = send(upload, tensors)
    report = upload.commit(total).result(60)
    upload.close()
    assert 0 < report.staged_s < time.monotonic() - begin
    assert 0 <= report.paused_s < time.monotonic() - begin
