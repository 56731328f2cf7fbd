"""The load bench: it notices what a server loses or mixes up, and its figures are what they say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from bench.load import figures, floor, streams, with_ghz
from bench.load.figures import Level, percentile
from bench.load.process import Cpu, cpu
from bench.load.streams import Answer, Seen, WrongAnswer
from penstock.v1 import inference_pb2, types_pb2

_IDS, _TEXT = (5, 6, 7, 8), "abcd"
_ANSWERS = dict.fromkeys(streams.PROMPTS, Answer(_IDS, _TEXT))


class _Enough(Exception):
    """The stub was asked a second time."""


class _Stub:
    """Streams these messages, once."""

    def __init__(self, deltas: Sequence[tuple[int, str]], counted: int = 4) -> None:
        self._deltas, self._counted, self._asked = deltas, counted, False

    async def Stream(self, request: Any) -> AsyncIterator[inference_pb2.StreamResponse]:
        if self._asked:
            raise _Enough
        self._asked = True
        for token, text in self._deltas:
            yield inference_pb2.StreamResponse(delta=inference_pb2.OutputDelta(token_ids=[token], text=text))
        usage = types_pb2.Usage(completion_tokens=self._counted)
        yield inference_pb2.StreamResponse(summary=inference_pb2.StreamSummary(usage=usage))


def _seen(stub: _Stub) -> Seen:
    seen = Seen()
    with contextlib.suppress(_Enough):
        asyncio.run(streams.stream_on(stub, 0, _ANSWERS, 4, seen))
    return seen


def test_a_whole_stream_is_counted() -> None:
    seen = _seen(_Stub(list(zip(_IDS, _TEXT, strict=True))))
    assert (seen.messages, seen.tokens, seen.requests, len(seen.gaps)) == (5, 4, 1, 3)


@pytest.mark.parametrize(
    ("deltas", "counted"),
    [
        ([(5, "a"), (7, "c"), (6, "b"), (8, "d")], 4),  # two messages have changed places
        ([(5, "a"), (6, "b"), (8, "d")], 4),  # one is lost
        ([(5, "a"), (6, "b"), (6, "b"), (7, "c"), (8, "d")], 4),  # one came twice
        ([(5, "a"), (6, "b"), (7, "d"), (8, "c")], 4),  # the text alone is wrong
        ([(5, "a"), (6, "b"), (7, "c"), (8, "d")], 3),  # the server counts others
    ],
)
def test_a_stream_that_differs_is_an_error(deltas: Sequence[tuple[int, str]], counted: int) -> None:
    with pytest.raises(WrongAnswer):
        _seen(_Stub(deltas, counted))


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(i) for i in range(1, 101)]
    assert percentile(values[::-1], 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([3.0], 0.99) == 3.0


def test_a_row_divides_the_servers_time_by_messages() -> None:
    seen = Seen(messages=100, tokens=250, gaps=[0.001, 0.002])
    level = Level("Stream", 8, 2.0, seen, Cpu(0.01, 0.02, 0.005, fronts=0.004), 0.0, 2048.0)
    row = "| Stream | 8 | 50 | 125 | 2.50 | 1.0 | 2.0 | 100.0 | 150.0 | 40.0 | 390.0 | 2 |"
    assert figures.row(level) == row


def test_processor_time_is_told_apart_by_thread() -> None:
    def work(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    before = cpu(os.getpid())
    work(0.2)
    worked, ended = threading.Event(), threading.Event()

    def other() -> None:
        work(0.1)
        worked.set()
        ended.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert worked.wait(60)
    used = cpu(os.getpid()) - before
    ended.set()
    thread.join()
    assert used.loop >= 0.19
    assert used.other >= 0.09


_TOLD = {
    "count": 3,
    "total": 1_500_000_000,
    "statusCodeDistribution": {"OK": 3},
    "latencyDistribution": [
        {"percentage": 50, "latency": 20_000_000},
        {"percentage": 99, "latency": 40_000_000},
    ],
}


def test_ghz_is_read() -> None:
    report = with_ghz.read(_TOLD, "Stream", 2, 10, Cpu(loop=0.003, model=0.003, other=0.003))
    assert with_ghz.row(report) == "| Stream | 2 | 2.0 | 20 | 20 | 40 | 100.0 | 200.0 | 300.0 |"


def test_a_failed_call_of_ghz_is_an_error() -> None:
    told = {**_TOLD, "statusCodeDistribution": {"OK": 2, "Unavailable": 1}}
    with pytest.raises(RuntimeError, match="Unavailable"):
        with_ghz.read(told, "Stream", 2, 10, Cpu())


def test_the_bare_server_serves() -> None:
    command = [sys.executable, "-m", "bench.load.floor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().removeprefix("ready on ").strip()
            with grpc.insecure_channel(address) as channel:
                stream: Any = channel.unary_stream(floor.METHOD)
                messages = list(stream(b"", timeout=60))
            assert messages == [floor.MESSAGE] * floor.MESSAGES
        finally:
            process.terminate()


def test_front_processes_are_told_apart_from_the_server_and_its_other_children() -> None:
    busy = "import sys; sum(i * i for i in range(3_000_000)); print(flush=True); sys.stdin.read()"
    before = cpu(os.getpid())
    children = [
        subprocess.Popen(
            [sys.executable, "-c", busy, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for arguments in (["penstock.service.relay.process"], ["another"])
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"\n"
        both, front = cpu(os.getpid()) - before, cpu(children[0].pid).host
        assert both.fronts == pytest.approx(front, abs=0.01)
        assert front > 0.05
    finally:
        for child in children:
            child.communicate()
