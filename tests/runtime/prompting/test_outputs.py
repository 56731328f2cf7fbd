"""A stop string ends an output in the engine once, and only while the engine knows the output by its id."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.runtime.prompting.outputs import LiveOutput
from penstock.runtime.requests.request import Finish, FinishReason, StepOutput, StoppingParams
from penstock.runtime.text.assembler import Assembler
from tests.service.codecs import byte_codec

STOPPED = Finish(FinishReason.STOP, stop="bc")


class Queue:
    """An engine's queue that records which outputs are ended."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, Finish]] = []

    def submit(self, *args: Any) -> None:
        raise AssertionError

    def cancel(self, *request_ids: str) -> None:
        raise AssertionError

    def finish(self, request_id: str, finish: Finish) -> None:
        self.ended.append((request_id, finish))


@pytest.mark.parametrize("holds_id", [True, False])
def test_the_engine_hears_of_a_stop_string_once(holds_id: bool) -> None:
    queue = Queue()
    assembler = Assembler(StoppingParams(stop=("bc",)), byte_codec(), index=3)
    live = LiveOutput(queue, "r", assembler, holds_id=lambda: holds_id)
    deltas = [live.add(StepOutput("r", tuple(text))) for text in (b"ab", b"cd", b"ef")]
    assert queue.ended == ([("r", STOPPED)] if holds_id else [])
    ended = [live.has_ended]
    last = live.add(StepOutput("r", finish=Finish(FinishReason.ABORTED)))
    assert [*ended, live.has_ended] == [False, True]
    assert "".join(delta.delta for delta in deltas) == "a"
    assert (last.index, last.finish) == (3, STOPPED)


def test_the_engine_does_not_hear_of_a_stop_in_the_last_output() -> None:
    queue = Queue()
    live = LiveOutput(queue, "r", Assembler(StoppingParams(stop=("bc",)), byte_codec()))
    delta = live.add(StepOutput("r", tuple(b"abc"), finish=Finish(FinishReason.MAX_TOKENS)))
    assert (delta.delta, delta.finish, queue.ended) == ("a", STOPPED, [])
