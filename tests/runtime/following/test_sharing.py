"""What the leader of a group sends of an update, and what it makes of what its followers say of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.runtime.errors import WeightsError
from penstock.runtime.following.interface import Call, Kind, Piece, Prepared, UpdateBegin, UpdateEnd
from penstock.runtime.following.regions import REGION_BYTES, KeptRegions
from penstock.runtime.following.sharing import SharedUpdate
from penstock.runtime.models.load_rules import Cut, LoadRule, LoadRules, Source, Span, Target
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.incoming import digest_of
from penstock.runtime.updating.interface import Staging

ROWS = 6
VALUES = np.arange(ROWS * REGION_BYTES // 4, dtype=np.float32).reshape(ROWS, REGION_BYTES // 4)
"""Each row is as large as a piece may be."""
SENT = SentTensor("w", "F32", VALUES.shape)
SHA256 = hashlib.sha256(VALUES.tobytes()).digest()
THREE = (range(1), range(1, 2), range(2, 3))
"""The devices of three processes."""


def digest(*rows: int) -> bytes:
    """Compute what a follower says that got these rows."""
    return digest_of([(SENT, hashlib.sha256(VALUES[list(rows)].tobytes()).digest())])


def rules_of(devices: int) -> LoadRules:
    """Make the rules of a weight whose rows are cut over the devices."""
    whole = LoadRule(
        sources=(Source("w", SENT.shape),),
        targets=(Target(("leaf",)),),
        num_rows=ROWS // devices,
        dtype=np.dtype(np.float32),
        cut=Cut(along="rows", spans=(Span(devices, ROWS // devices),)),
    )
    return LoadRules(rules=(whole,)).on_devices(devices)


class Log:
    """Followers that answer with these reports."""

    def __init__(self, *reports: Prepared) -> None:
        self.told: list[Any] = []
        self.sent: dict[int | None, list[bytes]] = {}
        self._reports = dict(enumerate(reports, 1))

    def open_update(self) -> int:
        return 7

    def tell(self, record: Any, process_id: int | None = None) -> None:
        if isinstance(record, Piece):
            assert (record.number, record.tensor_index) == (7, 0)
            self.sent.setdefault(process_id, []).append(bytes(record.data))
        else:
            self.told.append(record)

    def append(self, call: Call) -> None:
        self.told.append(call)

    def prepared(self, number: int) -> Mapping[int, Prepared]:
        return self._reports

    def give_up_update(self, number: int) -> None:
        self.told.append("given up")


def made(log: Any, uri: str = "", devices: Sequence[range] = THREE) -> SharedUpdate:
    def ready() -> None:
        log.told.append("ready")

    count = devices[-1].stop
    kept = {process: KeptRegions(own, count) for process, own in enumerate(devices) if process}
    return SharedUpdate(log, kept, Staging.HOST, [SENT], uri, ready, rules_of(count))


def shared(log: Any, uri: str = "", devices: Sequence[range] = THREE) -> SharedUpdate:
    update = made(log, uri, devices)
    update.put(SENT, VALUES, SHA256)
    return update


def test_each_follower_gets_its_rows_and_no_more() -> None:
    """The leader keeps the first two rows for itself."""
    log = Log(Prepared(7, digest(2, 3)), Prepared(7, digest(4, 5)))
    update = shared(log)
    assert update.finish() == {}
    update.install()
    assert log.told == [
        "ready",
        UpdateBegin(7, (SENT,), Staging.HOST),
        UpdateEnd(7),
        Call(Kind.INSTALL_WEIGHTS, "7"),
    ]
    assert log.sent == {
        process: [VALUES[row].tobytes() for row in rows] for process, rows in ((1, (2, 3)), (2, (4, 5)))
    }


def test_a_follower_with_two_devices_gets_the_rows_of_both() -> None:
    log = Log(Prepared(7, digest(3, 4, 5)))
    shared(log, devices=(range(3), range(3, 6))).finish()
    assert log.sent == {1: [VALUES[row].tobytes() for row in (3, 4, 5)]}


def test_tensors_of_files_are_not_sent() -> None:
    log = Log(*2 * [Prepared(7, digest_of([(SENT, SHA256)]))])
    assert shared(log, "file:///models/new").finish() == {}
    assert log.told == ["ready", UpdateBegin(7, (SENT,), Staging.HOST, "file:///models/new"), UpdateEnd(7)]
    assert log.sent == {}


def test_processes_with_other_tensors_are_found_out() -> None:
    with pytest.raises(WeightsError, match="process 2 of the group has other tensors than the leader"):
        shared(Log(Prepared(7, digest(2, 3)), Prepared(7, digest(2, 3)))).finish()


def test_values_that_only_a_follower_s_part_has_are_told() -> None:
    log = Log(Prepared(7, digest(2, 3)), Prepared(7, too_large={"w": "F16"}))
    assert shared(log).finish() == {"w": np.dtype(np.float16)}


def test_an_update_that_was_given_up_before_its_first_tensor_does_not_begin() -> None:
    log = Log()
    update = made(log)
    update.stop_waiting()
    with pytest.raises(WeightsError, match="taken back"):
        update.put(SENT, VALUES, SHA256)
    assert log.sent == {}
