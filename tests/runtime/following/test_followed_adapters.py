"""An adapter that the leader writes to a slot is written by its followers, or ends the group."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.runner import ProgramCalls
from penstock.runtime.following.interface import Call
from penstock.runtime.following.joining import check_adapters
from penstock.runtime.following.leading import LeadingCalls
from penstock.runtime.following.repeating import Repeater
from penstock.runtime.ops.native.hashing import digest_of_values
from tests.runtime.following.test_repeating import CONFIG

POOL = np.zeros((2, 4, 6), ml_dtypes.bfloat16)
"""Of two devices with four slots each, and six numbers in a slot."""
VALUES = np.arange(12, dtype=np.float32).reshape(2, 6).astype(POOL.dtype)


def logged(slot: int, values: np.ndarray[Any, Any], digest: str) -> list[Call]:
    """Return what the leader logs of a write."""
    calls: list[Call] = []
    leader = object.__new__(LeadingCalls)
    leader._log = mock.Mock(append=calls.append)
    with mock.patch.object(ProgramCalls, "write_adapter") as write:
        leader.write_adapter(slot, values, digest)
    write.assert_called_once_with(slot, values, digest)
    return calls


def follower(written: list[Any], *, pools: tuple[Any, ...] = (POOL,)) -> Repeater:
    device = SimpleNamespace(adapters=pools, sharding=SimpleNamespace(mesh=SimpleNamespace(size=2)))
    calls = SimpleNamespace(write_adapter=lambda *given: written.append(given))
    runner: Any = SimpleNamespace(device=device, make_calls=lambda programs: calls)
    programs: Any = SimpleNamespace(steps={})
    updates: Any = None
    return Repeater(runner, programs, updates)


def test_a_write_is_made_once_what_all_devices_have_has_come() -> None:
    written: list[Any] = []
    repeater, digest = follower(written), digest_of_values(VALUES)
    for slot, values in ((3, VALUES), (1, VALUES[::-1])):
        first, last = logged(slot, values, digest if slot == 3 else "")
        repeater.repeat(first)
        count = len(written)
        repeater.repeat(last)
        assert len(written) == count + 1
        at, got, told = written[-1]
        assert (at, got.dtype, told) == (slot, VALUES.dtype, first.program)
        np.testing.assert_array_equal(got, values)


def test_other_content_than_the_leader_s_is_not_written() -> None:
    written: list[Any] = []
    first, last = logged(1, VALUES, digest_of_values(VALUES))
    (slot, data), changed = last.arrays, np.array(last.arrays[1])
    changed[3] ^= 1
    repeater = follower(written)
    repeater.repeat(first)
    with pytest.raises(ValueError, match="not what the leader has"):
        repeater.repeat(last._replace(arrays=(slot, changed)))
    with pytest.raises(ValueError, match="no places for adapters"):
        follower(written, pools=()).repeat(first)
    assert written == []
    assert data.dtype == np.uint8  # which the wire has


def test_the_largest_rank_fits_a_call_or_the_one_that_would_is_named() -> None:
    """A slot of 2^23 units of rank 32 in float32 takes 1 GiB on a device, and a call has half of it."""
    config = dataclasses.replace(CONFIG, max_adapters=1, adapter_rank=32, adapter_size=1 << 23)
    with pytest.raises(ConfigError, match=r"max_adapter_rank: .* 1074 MB.* a rank of at most 16 fits"):
        check_adapters(config)
    check_adapters(dataclasses.replace(config, adapter_rank=16))
    check_adapters(CONFIG)
    with pytest.raises(ConfigError, match="no rank fits; without adapter_experts a place is far smaller"):
        check_adapters(dataclasses.replace(config, adapter_size=1 << 24))  # as of all experts of a mixture
