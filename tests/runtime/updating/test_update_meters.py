"""Weight updates in the engine's metrics: each that was begun ends once, with the figures of its report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from penstock.runtime import Engine
from penstock.runtime.errors import GenerationChanged, InvalidRequest, TensorsRefused
from penstock.runtime.measuring import engine_instruments as defined
from penstock.runtime.measuring.instruments import Instrument
from penstock.runtime.measuring.snapshot import HistogramPoint, Labels
from penstock.runtime.updating.interface import Staging, UpdateReport
from tests.support.updating import Arrays, begun, changed, send


@dataclass
class Meters:
    """What an engine has counted since this was made."""

    engine: Engine

    def __post_init__(self) -> None:
        self._before = self._read()

    def _read(self) -> dict[Instrument, dict[Labels, float | HistogramPoint]]:
        return {m.instrument: dict(m.points) for m in self.engine.registry.snapshot().metrics}

    def counted(self, instrument: Instrument) -> dict[Labels, float]:
        """Labels to how much was added, where anything was."""
        found: dict[Labels, float] = {}
        for labels, value in self._read()[instrument].items():
            before = self._before[instrument].get(labels, 0)
            assert not isinstance(value, HistogramPoint)
            assert not isinstance(before, HistogramPoint)
            if value != before:
                found[labels] = value - before
        return found

    def timed(self, instrument: Instrument) -> tuple[int, float]:
        """How many values were recorded, and their sum."""
        now, before = self._read()[instrument][()], self._before[instrument][()]
        assert isinstance(now, HistogramPoint)
        assert isinstance(before, HistogramPoint)
        return now.count - before.count, now.sum - before.sum


@pytest.fixture
def meters(engine: Engine) -> Meters:
    return Meters(engine)


def check_applied(meters: Meters, *reports: UpdateReport) -> None:
    """Check that the metrics say what the reports say."""
    assert meters.counted(defined.WEIGHTS_UPDATES) == {("applied",): len(reports)}
    assert meters.counted(defined.WEIGHTS_BYTES) == {(): sum(report.num_bytes for report in reports)}
    for instrument, times in (
        (defined.WEIGHTS_STAGING_TIME, [report.staged_s for report in reports]),
        (defined.WEIGHTS_PAUSE_TIME, [report.paused_s for report in reports]),
    ):
        count, total = meters.timed(instrument)
        assert count == len(reports)
        assert total == pytest.approx(sum(times))


@pytest.mark.parametrize("staging", list(Staging))
def test_an_upload_that_goes_live(engine: Engine, tensors: Arrays, meters: Meters, staging: Staging) -> None:
    reports = []
    for values in (changed(tensors), tensors):
        upload = begun(engine, values, "", staging=staging)
        reports.append(upload.commit(send(upload, values)).result(60))
        upload.close()
    check_applied(meters, *reports)


def test_an_update_of_arrays(engine: Engine, tensors: Arrays, meters: Meters) -> None:
    check_applied(meters, engine.update_weights(tensors, label="same").result(60))


def test_an_upload_that_breaks_off(engine: Engine, tensors: Arrays, meters: Meters) -> None:
    upload = begun(engine, tensors)
    size = send(upload, tensors, only=[0])
    upload.close()
    upload.close()
    assert meters.counted(defined.WEIGHTS_UPDATES) == {("failed",): 1}
    assert meters.counted(defined.WEIGHTS_BYTES) == {(): size}
    assert meters.timed(defined.WEIGHTS_STAGING_TIME) == (0, 0)


def test_an_upload_that_is_refused(engine: Engine, tensors: Arrays, meters: Meters) -> None:
    upload = begun(engine, tensors)
    with pytest.raises(TensorsRefused):
        upload.commit(send(upload, tensors, only=[0]))
    upload.close()
    assert meters.counted(defined.WEIGHTS_UPDATES) == {("failed",): 1}


def test_an_update_of_arrays_that_fails(engine: Engine, tensors: Arrays, meters: Meters) -> None:
    class Fickle(dict[str, Any]):
        """Has other arrays each time that they are asked for."""

        def __getitem__(self, name: str) -> Any:
            return super().__getitem__(name)[:5]

    with pytest.raises(InvalidRequest):
        engine.update_weights(Fickle(tensors), label="fickle")
    assert meters.counted(defined.WEIGHTS_UPDATES) == {("failed",): 1}


def test_one_that_was_never_begun_is_none(engine: Engine, tensors: Arrays, meters: Meters) -> None:
    with pytest.raises(TensorsRefused):
        begun(engine, dict(list(tensors.items())[1:]))
    with pytest.raises(TensorsRefused):
        engine.update_weights({}, label="nothing")
    assert meters.counted(defined.WEIGHTS_UPDATES) == {}


def test_a_staged_update_ends_when_it_is_discarded_or_live(
    engine: Engine, tensors: Arrays, meters: Meters
) -> None:
    upload = begun(engine, tensors, "a", stage_only=True)
    upload.stage(send(upload, tensors))
    upload.close()
    assert meters.counted(defined.WEIGHTS_UPDATES) == {}
    assert meters.timed(defined.WEIGHTS_STAGING_TIME)[0] == 1
    assert engine.updater.discard("a")
    assert not engine.updater.discard("a")
    assert meters.counted(defined.WEIGHTS_UPDATES) == {("discarded",): 1}
    upload = begun(engine, tensors, "b", stage_only=True)
    upload.stage(send(upload, tensors))
    upload.close()
    engine.updater.commit_staged("b").result(60)
    engine.updater.commit_staged("b").result(60)  # it is live already: nothing is done
    assert meters.counted(defined.WEIGHTS_UPDATES) == {("discarded",): 1, ("applied",): 1}


def test_a_commit_that_leaves_the_update_staged_ends_nothing(
    engine: Engine, tensors: Arrays, meters: Meters
) -> None:
    upload = begun(engine, tensors, "s", stage_only=True, expected_generation=engine.weights.generation)
    upload.stage(send(upload, tensors))
    upload.close()
    engine.update_weights(tensors, label="between").result(60)
    with pytest.raises(GenerationChanged):
        engine.updater.commit_staged("s").result(60)
    assert meters.counted(defined.WEIGHTS_UPDATES) == {("applied",): 1}
    assert engine.updater.discard("s")
    assert meters.counted(defined.WEIGHTS_UPDATES) == {("applied",): 1, ("discarded",): 1}


def test_an_update_that_loses_its_generation(engine: Engine, tensors: Arrays, meters: Meters) -> None:
    upload = begun(engine, tensors, "late", expected_generation=engine.weights.generation)
    size = send(upload, tensors)
    engine.update_weights(tensors, label="between").result(60)
    with pytest.raises(GenerationChanged):
        upload.commit(size).result(60)
    upload.close()
    assert meters.counted(defined.WEIGHTS_UPDATES) == {("applied",): 1, ("failed",): 1}
