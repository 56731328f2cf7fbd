"""Measures the OpenAI front against gRPC on the same server, in turns.

    python -m bench.http                                          # 1, 8, 64 streams on the demo model
    python -m bench.http --checkpoint bench/out/model             # and W2: 16 at once, 256 in, 128 out
    python -m bench.http --front=--workers=2

"gRPC" calls Stream with generated stubs; "HTTP" calls /v1/completions with stream true. Both take text, and
both clients do as little as they can. Every stream's text is compared with what the server said to the same
prompt alone. The figures are medians of turns; on a machine that others use, processor times tell more than
rates.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from bench.http.servers import Rig, running
from bench.http.sse import Connection, parts_of
from bench.load.streams import PROMPTS, WrongAnswer
from bench.workloads import select, waves
from penstock.v1 import inference_pb2, inference_pb2_grpc, types_pb2

_WAYS = ("gRPC", "HTTP")


@dataclass(frozen=True, slots=True)
class Ask:
    """What one stream asks for, greedily and without end tokens."""

    prompt: str | tuple[int, ...]
    max_tokens: int

    def message(self) -> inference_pb2.StreamRequest:
        request = inference_pb2.StreamRequest(
            sampling=types_pb2.SamplingParams(temperature=0),
            stopping=types_pb2.StoppingParams(max_tokens=self.max_tokens, ignore_eos=True),
            output=types_pb2.OutputOptions(token_ids=False),
        )
        if isinstance(self.prompt, str):
            request.prompt = self.prompt
        else:
            request.prompt_token_ids.ids.extend(self.prompt)
        return request

    def body(self, model: str) -> dict[str, Any]:
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        how = {"temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
        return {"model": model, "prompt": prompt, "max_tokens": self.max_tokens, **how}


Asks = Sequence[Sequence[Ask]]
"""Lists of streams. The lists run at the same time, and the streams of a list one after the other."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What one stream was."""

    text: str
    tokens: int
    messages: int
    first_s: float
    """Until the first message with text."""


async def over_grpc(stub: Any, ask: Ask) -> Stream:
    """Run one stream over gRPC."""
    began, first, texts, tokens, messages = time.perf_counter(), 0.0, [], 0, 0
    async for message in stub.Stream(ask.message()):
        messages += 1
        if message.HasField("delta"):
            first = first or time.perf_counter() - began
            texts.append(message.delta.text)
        elif message.HasField("summary"):
            tokens = message.summary.usage.completion_tokens
    return Stream("".join(texts), tokens, messages, first)


async def over_http(connection: Connection, model: str, ask: Ask) -> Stream:
    """Stream the same over HTTP."""
    began, first, texts, tokens, messages = time.perf_counter(), 0.0, [], 0, 0
    async for data in connection.stream(ask.body(model)):
        messages += 1
        text, counted = parts_of(data)
        if text is not None:
            first = first or time.perf_counter() - began
            texts.append(text)
        tokens = counted or tokens
    return Stream("".join(texts), tokens, messages, first)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one way."""

    seconds: float
    streams: tuple[Stream, ...]
    server_s: float
    front_s: float
    """Processor times."""

    @property
    def tokens_per_s(self) -> float:
        return sum(stream.tokens for stream in self.streams) / self.seconds

    @property
    def first_ms(self) -> float:
        return 1e3 * median(stream.first_s for stream in self.streams)

    def micros(self, seconds: float) -> float:
        """Write so much processor time, for each message, in microseconds."""
        return 1e6 * seconds / sum(stream.messages for stream in self.streams)


Caller = Callable[[Ask], Awaitable[Stream]]


@contextlib.asynccontextmanager
async def callers(way: str, rig: Rig, count: int) -> AsyncIterator[list[Caller]]:
    """Make so many functions that run one stream each, at the same time."""
    async with contextlib.AsyncExitStack() as stack:
        if way == "gRPC":
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(rig.address))
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            yield [lambda ask: over_grpc(stub, ask)] * count
            return
        connections = [Connection(rig.host, rig.port) for _ in range(count)]
        for connection in connections:
            stack.push_async_callback(connection.close)
        yield [lambda ask, one=connection: over_http(one, rig.model, ask) for connection in connections]  # type: ignore[misc]


async def turn(way: str, rig: Rig, asks: Asks) -> Turn:
    """Run these streams."""

    async def one(caller: Caller, mine: Sequence[Ask]) -> list[Stream]:
        return [await caller(ask) for ask in mine]

    async with callers(way, rig, len(asks)) as each:
        await asyncio.gather(*(caller(Ask("A", 1)) for caller in each))  # connects, outside of the figures
        server, front = rig.cpu()
        began = time.perf_counter()
        found = await asyncio.gather(*(one(caller, mine) for caller, mine in zip(each, asks, strict=True)))
        seconds = time.perf_counter() - began
        server_after, front_after = rig.cpu()
    streams = tuple(stream for mine in found for stream in mine)
    return Turn(seconds, streams, server_after - server, front_after - front)


async def compared(name: str, rig: Rig, plan: Sequence[Mapping[str, Asks]], check: bool) -> None:
    """Run the lists of both ways in turns, the first ones unmeasured, and print a line for each way and one
    for the difference. Where `check` is set, both ways ask for the same in every turn.
    """
    answers: dict[Ask, str] = {}
    if check:
        async with callers("gRPC", rig, 1) as (caller,):
            for ask in {ask for mine in plan[0]["gRPC"] for ask in mine}:
                answers[ask] = (await caller(ask)).text
    found: dict[str, list[Turn]] = {way: [] for way in _WAYS}
    for number, each in enumerate(plan):
        for way in _WAYS if number % 2 else reversed(_WAYS):
            asks = each[way]
            took = await turn(way, rig, asks)
            for ask, stream in zip((ask for mine in asks for ask in mine), took.streams, strict=True):
                if stream.tokens != ask.max_tokens or stream.text != answers.get(ask, stream.text):
                    raise WrongAnswer(f"{way} answered {stream!r} to {ask!r}")
            if number:
                found[way].append(took)
    for way, turns in found.items():
        figures = [
            f"{median(one.tokens_per_s for one in turns):,.0f}",
            f"{median(one.first_ms for one in turns):.1f}",
            f"{median(one.micros(one.server_s) for one in turns):.0f}",
            f"{median(one.micros(one.front_s) for one in turns):.0f}",
        ]
        print(f"| {name} | {way} | {' | '.join(figures)} |", flush=True)
    pairs = list(zip(found["gRPC"], found["HTTP"], strict=True))
    rate = median(http.tokens_per_s / own.tokens_per_s for own, http in pairs)
    added = median(http.first_ms - own.first_ms for own, http in pairs)
    print(f"| {name} | HTTP against gRPC | {100 * (rate - 1):+.1f} % | {added:+.1f} | | |", flush=True)


async def measure(rig: Rig, options: argparse.Namespace) -> None:
    print(
        "| load | way | tokens/s | to the first token, ms | server, µs per message | front, µs per message |"
    )
    print("|---|---|---:|---:|---:|---:|")
    for count in options.streams:
        each = -(-options.requests // count)
        asks = [[Ask(PROMPTS[i % len(PROMPTS)], options.tokens)] * each for i in range(count)]
        await compared(
            f"{count} at once", rig, [dict.fromkeys(_WAYS, asks)] * (1 + options.rounds), check=True
        )
    for name in options.workloads.split(",") if options.workloads else ():
        (workload,) = select([name])
        plan = []
        for number in range(1 + options.rounds):
            lists = {}
            for way_number, way in enumerate(_WAYS):
                # other tokens for each way: the prefix cache would have what the first one has asked for
                (jobs,) = waves(workload, 2 * number + way_number, options.num_words)
                lists[way] = [[Ask(job.token_ids, job.max_tokens)] for job in jobs]
            plan.append(lists)
        await compared(name, rig, plan, check=False)


def main() -> int:
    described = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench.http", description=described)
    parser.add_argument("--checkpoint", default="demo", metavar="DIR", help="default: the demo model")
    parser.add_argument(
        "--workloads", metavar="W1,W2", help="of bench.workloads, of one wave; default: W2 with --checkpoint"
    )
    parser.add_argument("--num-words", type=int, default=151_643, metavar="N", help="see bench.run")
    parser.add_argument(
        "--streams", type=int, nargs="*", metavar="N", help="default: 1 8 64 on the demo model"
    )
    parser.add_argument(
        "--requests", type=int, default=128, metavar="N", help="of a turn; default: %(default)s"
    )
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--serve", nargs="+", default=[], metavar="ARGUMENT", help="more for penstock serve")
    parser.add_argument("--front", nargs="+", default=[], metavar="ARGUMENT", help="more for penstock openai")
    parser.add_argument("--log", type=Path, default=Path("bench/out/http.log"), help="%(default)s")
    options = parser.parse_args()
    is_demo = options.checkpoint == "demo"
    if options.streams is None:
        options.streams = [1, 8, 64] if is_demo else []
    if options.workloads is None:
        options.workloads = "" if is_demo else "W2"
    slots = ["--max-num-seqs", str(max([16, *options.streams]))]
    with running(options.checkpoint, options.log, [*slots, *options.serve], options.front) as rig:
        asyncio.run(measure(rig, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
