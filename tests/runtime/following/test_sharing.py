"""What the leader of a group makes of what its followers say of an update."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.runtime.errors import WeightsError
from penstock.runtime.following.interface import Call, Kind, Piece, Prepared, UpdateBegin, UpdateEnd
from penstock.runtime.following.sharing import PIECE_BYTES, SharedUpdate
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.incoming import digest_of
from penstock.runtime.updating.interface import Staging

VALUES = np.arange(3 + PIECE_BYTES // 4, dtype=np.float32)
SENT = SentTensor("w", "F32", VALUES.shape)
SHA256 = hashlib.sha256(VALUES.tobytes()).digest()
DIGEST = digest_of([(SENT, SHA256)])


class Log:
    """Followers that answer with these reports."""

    def __init__(self, *reports: Prepared) -> None:
        self.told: list[Any] = []
        self._reports = reports

    def open_update(self) -> int:
        return 7

    def tell(self, record: Any) -> None:
        self.told.append(record)

    def append(self, call: Call) -> None:
        self.told.append(call)

    def prepared(self, number: int) -> Sequence[Prepared]:
        return self._reports

    def give_up_update(self, number: int) -> None:
        self.told.append("given up")


def shared(log: Any, uri: str = "") -> SharedUpdate:
    update = SharedUpdate(log, Staging.HOST, [SENT], uri, lambda: log.told.append("ready"))
    update.put(SENT, VALUES, SHA256)
    return update


def test_a_tensor_goes_in_pieces_and_is_installed_by_a_call() -> None:
    log = Log(Prepared(7, DIGEST))
    update = shared(log)
    assert update.finish() == {}
    update.install()
    ready, begin, *pieces, end, install = log.told
    assert (ready, begin) == ("ready", UpdateBegin(7, (SENT,), Staging.HOST))
    assert [len(piece.data) for piece in pieces] == [PIECE_BYTES, 12]
    assert b"".join(piece.data for piece in pieces) == VALUES.tobytes()
    assert (end, install) == (UpdateEnd(7), Call(Kind.INSTALL_WEIGHTS, "7"))


def test_tensors_of_files_are_not_sent() -> None:
    log = Log(Prepared(7, DIGEST))
    assert shared(log, "file:///models/new").finish() == {}
    assert log.told == ["ready", UpdateBegin(7, (SENT,), Staging.HOST, "file:///models/new"), UpdateEnd(7)]


def test_processes_with_other_tensors_are_found_out() -> None:
    with pytest.raises(WeightsError, match="have read different tensors"):
        shared(Log(Prepared(7, DIGEST), Prepared(7, b"other"))).finish()


def test_values_that_only_a_follower_s_part_has_are_told() -> None:
    log = Log(Prepared(7, DIGEST), Prepared(7, too_large={"w": "F16"}))
    assert shared(log).finish() == {"w": np.dtype(np.float16)}


def test_an_update_that_was_given_up_before_its_first_tensor_does_not_begin() -> None:
    log: Any = Log()
    update = SharedUpdate(log, Staging.HOST, [SENT], "", lambda: None)
    update.stop_waiting()
    with pytest.raises(WeightsError, match="taken back"):
        update.put(SENT, VALUES, SHA256)
    assert not any(isinstance(record, Piece) for record in log.told)
