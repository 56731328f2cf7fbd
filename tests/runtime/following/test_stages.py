"""Stages in several processes: in which order each process calls its own stage and the links to others, and
what a follower has for its part. The programs are stand-ins that note their calls.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from penstock.runtime.execution.buckets import Buckets, ProgramKey
from penstock.runtime.execution.own_stage import Link, Links
from penstock.runtime.execution.step_buffer import MAX_SAMPLES, SLOT
from penstock.runtime.following.interface import Call, Kind
from penstock.runtime.following.stages import LastStageCalls, StageRepeater
from tests.runtime.following.test_repeating import CONFIG as OF_TOYS
from tests.runtime.following.test_repeating import Log

CONFIG = dataclasses.replace(OF_TOYS, buckets=Buckets((4,), (4,), window_steps=()))
KEY = ProgramKey(4, 4, decode_only=True)
PADDING = CONFIG.max_num_seqs
"""The slot of rows that are padding."""


def packed(*slots: int, silent: tuple[int, ...] = ()) -> np.ndarray:
    """Make the buffer of a step with a row for each of these slots. Those of `silent` sample nothing."""
    layout = CONFIG.layout(KEY, 1)
    buffer = np.zeros(layout.size, np.int32)
    fields = layout.row_views(buffer[: layout.rows_size])[1]
    fields[:, SLOT] = PADDING
    for row, slot in enumerate(slots):
        fields[row, SLOT], fields[row, MAX_SAMPLES] = slot, slot not in silent
    return buffer


class Side:
    """One process: the links and the programs of its stage, which note what is called."""

    def __init__(self, *, is_first: bool = False, is_last: bool = False) -> None:
        self.calls: list[str] = []
        self.given: list[Any] = []
        """What the stage was given in each step."""
        self.num_received = 0
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
                tokens=self._link("tokens") if is_first or is_last else None,
            ),
        )

    def _link(self, name: str) -> Any:
        def receive(size: int) -> str:
            self.calls.append(f"receive {name}")
            self.num_received += name == "tokens"
            return f"{name} {self.num_received}"

        return SimpleNamespace(receive=receive, send=lambda arrays: self.calls.append(f"send {name}"))

    def compute(self, leaves: Any, kv: Any, rows: Any, buffer: Any, given: Any) -> Any:
        self.calls.append("compute")
        self.given.append(given)
        return (kv, rows, "logits", "hidden") if self.links.passed is None else (kv, rows, "passed")

    def noted(self, call: str, result: Any) -> Any:
        self.calls.append(call)
        return result

    @property
    def of_links(self) -> list[str]:
        """The calls of links, by name."""
        return [call.split()[1].replace("passed", "given") for call in self.calls if call != "compute"]


def follower(side: Side) -> StageRepeater:
    runner: Any = SimpleNamespace(device=side.device, config=CONFIG)
    programs: Any = SimpleNamespace(
        steps={KEY: side.compute},
        table_rows=lambda rows, buffer: side.noted("table rows", rows),
        copy_pages=lambda kv, pairs: side.noted("copy pages", kv),
    )
    updates: Any = SimpleNamespace(install=lambda number: side.calls.append(f"install {number}"))
    return StageRepeater(runner, programs, side.links, updates)


def leader(side: Side, log: Log) -> LastStageCalls:
    chosen = SimpleNamespace()
    programs: Any = SimpleNamespace(
        steps={KEY: side.compute}, choices={4: lambda rows, logits, buffer, masks: (rows, chosen)}
    )
    return LastStageCalls(programs, side.device, CONFIG, cast("Any", log), side.links)


def forward(*slots: int) -> Call:
    return Call(Kind.FORWARD, KEY.name, (packed(*slots),))


def choice(*slots: int, silent: tuple[int, ...] = ()) -> Call:
    return Call(Kind.CHOOSE, arrays=(packed(*slots, silent=silent),))


@pytest.mark.parametrize(
    ("before", "step", "expected"),
    [
        ([], (0, 1), ["compute", "send passed"]),
        ([choice(2, 3)], (0, 1), ["compute", "receive tokens", "send passed"]),
        ([choice(1)], (0, 1), ["receive tokens", "compute", "send passed"]),
        ([choice(1, silent=(1,))], (0, 1), ["compute", "receive tokens", "send passed"]),
        ([choice(1), choice(2)], (0, 1), ["receive tokens", "compute", "send passed"]),
    ],
    ids=["none", "of others", "its own", "a row that made none", "two choices"],
)
def test_the_first_stage_waits_for_tokens_before_it_computes_only_where_a_row_reads_one(
    before: list[Call], step: tuple[int, ...], expected: list[str]
) -> None:
    side = Side(is_first=True)
    repeater = follower(side)
    repeater.repeat(forward(2, 3))
    side.calls.clear()
    for call in [*before, forward(*step)]:
        repeater.repeat(call)
    assert side.calls == expected
    zeros, given_now = side.given
    assert zeros.tolist() == [0, 0, 0, 0]
    assert given_now is zeros if expected[0] == "compute" else given_now == "tokens 1"


def test_a_stage_between_others_passes_no_tokens() -> None:
    side = Side()
    repeater = follower(side)
    for call in (forward(0), choice(0), forward(0)):
        repeater.repeat(call)
    assert side.calls == 2 * ["receive given", "compute", "send passed"]


@given(st.lists(st.frozensets(st.integers(0, 3), min_size=1), max_size=12), st.data())
def test_both_ends_of_the_links_are_called_in_the_same_order(
    steps: list[frozenset[int]], data: st.DataObject
) -> None:
    """Otherwise each of two processes would wait for what the other one has not begun. And a row reads the
    tokens of the latest choice that it has made: each step is chosen from before the next one is called.
    """
    log, last, first = Log(), Side(is_last=True), Side(is_first=True)
    calls, repeater = leader(last, log), follower(first)
    made: dict[int, int] = {}
    num_choices = 0
    for number, slots in enumerate(steps):
        needed = max((made.get(slot, 0) for slot in slots), default=0)
        logits: Any = SimpleNamespace(shape=(4, 1))
        buffer = packed(*slots)
        calls.forward(KEY, buffer)
        for call in log.calls:
            repeater.repeat(call)
        log.calls.clear()
        known = first.given[number]
        assert (0 if not isinstance(known, str) else int(known.split()[1])) >= needed
        if data.draw(st.booleans()):  # else the step only reads
            calls.choose(logits, buffer, None)
            num_choices += 1
            made |= dict.fromkeys(slots, num_choices)
    assert last.of_links == first.of_links
    assert first.of_links.count("given") == len(steps)


@pytest.mark.parametrize("does", ["send", "receive"])
def test_the_loss_of_a_process_is_an_error_of_the_device(does: str) -> None:
    """JAX raises a ValueError where XLA computes a small program within the call, as gloo's is here."""

    def program(*arrays: Any) -> Any:
        raise ValueError("UNKNOWN: Gloo collective permute failed: Connection reset by peer")

    link: Any = object.__new__(Link)
    link._programs, link._nothing, link._at_one_end = {1: program}, {1: []}, lambda array: array
    with pytest.raises(jax.errors.JaxRuntimeError, match="Connection reset by peer"):
        getattr(link, does)(np.zeros(1) if does == "send" else 1)


def test_what_concerns_the_last_stage_alone_is_left_out() -> None:
    side = Side(is_first=True)
    repeater = follower(side)
    for kind in (Kind.ADMIT, Kind.PROMPT_LOGPROBS, Kind.HIDDEN_SUMS):
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
        (choice(0), "no forward came before"),
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
