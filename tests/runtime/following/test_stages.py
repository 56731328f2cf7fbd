"""Stages in several processes: what each process calls of its own stage and of the links to others, and which
tokens the leader's calls have. The programs are stand-ins that note their calls.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from bench.drivers.over_grpc import free_port
from penstock.runtime.errors import GroupEnded
from penstock.runtime.execution.buckets import Buckets, ProgramKey
from penstock.runtime.execution.own_stage import Links
from penstock.runtime.execution.step_buffer import FEEDBACK, MAX_SAMPLES, NUM_TOKENS, SLOT
from penstock.runtime.following.interface import Call, Kind
from penstock.runtime.following.leading import _explained_by
from penstock.runtime.following.stages import LastStageCalls, StageRepeater
from tests.runtime.following.test_repeating import CONFIG as OF_TOYS
from tests.runtime.following.test_repeating import Log
from tests.support.passing import values

CONFIG = dataclasses.replace(OF_TOYS, buckets=Buckets((4,), (4,), window_steps=()))
KEY = ProgramKey(4, 4, decode_only=True)
PADDING = CONFIG.max_num_seqs
"""The slot of rows that are padding."""


def packed(*slots: int, silent: tuple[int, ...] = (), given: int | None = None) -> np.ndarray:
    """Make the buffer of a step with a row of one token for each of these slots, which is its last one or
    `given`. Those of `silent` sample nothing.
    """
    layout = CONFIG.layout(KEY, 1)
    buffer = np.zeros(layout.size, np.int32)
    _, fields, _, tokens = layout.views(buffer)
    fields[:, SLOT] = PADDING
    for row, slot in enumerate(slots):
        fields[row, [SLOT, NUM_TOKENS, MAX_SAMPLES]] = slot, 1, slot not in silent
        tokens[row] = FEEDBACK if given is None else given
    return buffer


class Chosen:
    """The tokens of a step's rows, int32[1, R], which are known when they are read."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = np.array([[*tokens, *[0] * (KEY.rows - len(tokens))]], np.int32)
        self.is_read = False

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.is_read = True
        return self.tokens


class Side:
    """One process: the links and the programs of its stage, which note what is called."""

    def __init__(self, *, is_first: bool = False, is_last: bool = False) -> None:
        self.calls: list[str] = []
        self.given: list[Any] = []
        """What the stage was given in each step."""
        self.device: Any = SimpleNamespace(
            leaves=(),
            kv="kv",
            rows=SimpleNamespace(tokens="tokens"),
            num_pages=(8,),
            sharding=SingleDeviceSharding(jax.devices()[0]),
        )
        self.links = cast(
            "Links",
            SimpleNamespace(
                given=None if is_first else self._link("given"),
                passed=None if is_last else self._link("passed"),
            ),
        )

    def _link(self, name: str) -> Any:
        def receive(size: int) -> str:
            self.calls.append(f"receive {name}")
            return name

        return SimpleNamespace(receive=receive, send=lambda arrays: self.calls.append(f"send {name}"))

    def compute(self, leaves: Any, kv: Any, rows: Any, buffer: Any, given: Any) -> Any:
        self.calls.append("compute")
        self.given.append(given)
        return (kv, rows, "logits", "hidden") if self.links.passed is None else (kv, rows, "passed")

    def noted(self, call: str, result: Any) -> Any:
        self.calls.append(call)
        return result


def follower(side: Side) -> StageRepeater:
    runner: Any = SimpleNamespace(device=side.device, config=CONFIG)
    programs: Any = SimpleNamespace(
        steps={KEY: side.compute},
        table_rows=lambda rows, buffer: side.noted("table rows", rows),
        copy_pages=lambda kv, pairs: side.noted("copy pages", kv),
    )
    updates: Any = SimpleNamespace(install=lambda number: side.calls.append(f"install {number}"))
    return StageRepeater(runner, programs, side.links, updates)


def leader(side: Side, log: Log, *, num_stages: int = 3) -> LastStageCalls:
    programs: Any = SimpleNamespace(
        steps={KEY: side.compute},
        choices={4: lambda rows, logits, buffer, masks: (rows, SimpleNamespace(tokens=logits.chosen))},
    )
    return LastStageCalls(programs, side.device, CONFIG, cast("Any", log), side.links, num_stages=num_stages)


def forward(*slots: int) -> Call:
    return Call(Kind.FORWARD, KEY.name, (packed(*slots),))


def choice(*slots: int) -> Call:
    return Call(Kind.CHOOSE, arrays=(packed(*slots),))


def choose(calls: LastStageCalls, chosen: Chosen, buffer: np.ndarray) -> None:
    logits: Any = SimpleNamespace(shape=(KEY.rows, 1), chosen=chosen)
    calls.choose(logits, buffer[: CONFIG.layout(KEY, 1).rows_size], None)


def sent(log: Log) -> list[int]:
    """Return the input tokens of the last call."""
    (buffer,) = log.calls[-1].arrays
    return [int(token) for token in CONFIG.layout(KEY, 1).views(buffer)[3]]


@given(st.integers(2, 4), st.lists(st.frozensets(st.integers(0, 3), min_size=1), max_size=14), st.data())
def test_the_leaders_calls_have_the_tokens_that_were_chosen_last(
    num_stages: int, steps: list[frozenset[int]], data: st.DataObject
) -> None:
    """And it waits for no choice behind the latest one that has a row of the step, unless more steps have
    come since than can be in flight.
    """
    log = Log()
    calls = leader(Side(is_last=True), log, num_stages=num_stages)
    last, made = [0, 0, 0, 0], list[tuple[Chosen, frozenset[int]]]()
    for number, slots in enumerate(steps):
        given = 7 if data.draw(st.booleans()) else None  # as of a prompt
        silent = tuple(data.draw(st.frozensets(st.sampled_from(sorted(slots)))))
        buffer = packed(*slots, silent=silent, given=given)
        read = [chosen.is_read for chosen, _ in made]
        calls.forward(KEY, buffer)
        wanted = [last[slot] if given is None else given for slot in slots]
        assert sent(log) == [*wanted, *[0] * (KEY.rows - len(slots))]
        needed = max((i for i, (_, rows) in enumerate(made) if rows & slots and given is None), default=-1)
        assert [chosen.is_read for chosen, _ in made] == [
            was_read or i <= needed for i, was_read in enumerate(read)
        ]
        if data.draw(st.booleans()):  # else the step only reads
            tokens = [100 * number + slot for slot in slots]
            made.append((Chosen(*tokens), slots - set(silent)))
            choose(calls, made[-1][0], buffer)
            for slot, token in zip(slots, tokens, strict=True):
                last[slot] = last[slot] if slot in silent else token
            assert not any(chosen.is_read for chosen, _ in made[len(made) - 1 :])
            assert all(chosen.is_read for chosen, _ in made[: -num_stages - 1])


def test_tokens_of_a_prompt_stay_as_they_are_beside_rows_that_decode() -> None:
    log = Log()
    calls = leader(Side(is_last=True), log)
    choose(calls, Chosen(31), packed(2))
    buffer = packed(0, 2)
    _, fields, _, tokens = CONFIG.layout(KEY, 1).views(buffer)
    fields[:2, NUM_TOKENS] = 3, 1
    tokens[:] = 5, 6, 7, FEEDBACK
    calls.forward(KEY, buffer)
    assert sent(log) == [5, 6, 7, 31]


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        (Side(is_first=True), ["compute", "send passed"]),
        (Side(), ["receive given", "compute", "send passed"]),
    ],
    ids=["first", "between"],
)
def test_a_stage_passes_a_step_whatever_the_stages_behind_it_do(side: Side, expected: list[str]) -> None:
    """Nothing goes back to it."""
    repeater = follower(side)
    for call in (forward(0), choice(0), forward(0)):
        repeater.repeat(call)
    assert side.calls == 2 * expected


@pytest.mark.parametrize(
    ("error", "is_of_device"),
    [
        (jax.errors.JaxRuntimeError("INTERNAL: Connection reset by peer"), True),
        (ValueError("UNKNOWN: Gloo collective permute failed: Connection reset by peer"), True),
        (ValueError("INVALID_ARGUMENT: Executable expected parameter 0 of size 4"), False),
        (ValueError("there is no program"), False),
        (KeyError("UNKNOWN: "), False),
    ],
)
def test_the_loss_of_a_process_is_told_as_the_groups_end(error: Exception, is_of_device: bool) -> None:
    """JAX raises a ValueError where XLA computes a small program within the call, as gloo's is here."""
    log = Mock(explained=lambda error: GroupEnded(f"explained: {error}"))
    expected = pytest.raises(GroupEnded, match="explained") if is_of_device else pytest.raises(type(error))
    with expected, _explained_by(log):
        raise error


def test_what_concerns_the_last_stage_alone_is_left_out() -> None:
    side = Side(is_first=True)
    repeater = follower(side)
    for kind in (Kind.CHOOSE, Kind.ADMIT, Kind.PROMPT_LOGPROBS, Kind.HIDDEN_SUMS):
        repeater.repeat(Call(kind, arrays=(packed(0),)))
    assert side.calls == []
    for call in (
        Call(Kind.TABLE_ROWS, arrays=(packed(0),)),
        Call(Kind.COPY_PAGES, arrays=(packed(0),)),
        Call(Kind.INSTALL_WEIGHTS, "7"),
    ):
        repeater.repeat(call)
    assert side.calls == ["table rows", "copy pages", "install 7"]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (Call(Kind.FORWARD, "other", (packed(0),)), "there is no program 'other'"),
        (Call(Kind.WINDOW, KEY.name, (packed(0),)), "makes no calls of the kind window"),
        (Call(Kind.GUESS, "4", (packed(0),)), "makes no calls of the kind guess"),
        (Call(Kind.ENCODE, "4", (packed(0),)), "makes no calls of the kind encode"),
        (Call(Kind.WRITE_ADAPTER, "", (packed(0),)), "makes no calls of the kind write_adapter"),
    ],
)
def test_calls_that_no_leader_of_stages_makes_are_refused(call: Call, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        follower(Side(is_first=True)).repeat(call)


@pytest.mark.ci
def test_who_calls_a_link_waits_for_nobody() -> None:
    """The receiver comes back from its call before the sender makes its own. So a leader goes on to plan and
    to log steps while the stages before it compute.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tests.support.passing"]
    sender, receiver = (
        subprocess.Popen(
            [*command, str(process), coordinator], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for process in range(2)
    )
    ended = threading.Timer(300.0, receiver.kill)  # otherwise a call that waits would do so for ever
    ended.start()
    try:
        assert receiver.stdout is not None
        assert sender.stdin is not None
        said = (line for line in receiver.stdout if not line.startswith("[Gloo]"))
        assert next(said) == "called\n"
        sender.stdin.write("go\n")
        sender.stdin.flush()
        assert json.loads(next(said)) == values().tolist()
        for process in (sender, receiver):
            process.wait(timeout=120)
        assert (sender.returncode, receiver.returncode) == (0, 0)
    finally:
        ended.cancel()
        for process in (sender, receiver):
            process.kill()
            process.communicate()
