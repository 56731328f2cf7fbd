"""Measures a server under 1, 8, 64 and 256 streams at once: our client's, and ghz's.

    python -m bench.load                                   # the demo model, our client
    python -m bench.load --ghz "$(go env GOPATH)/bin/ghz"  # and ghz
    python -m bench.load --tree ../other --streams 64      # the server of another commit's worktree
    python -m bench.load --connections 16 --serve=--front-processes=2
    python -m bench.load --slow                            # what a slow reader costs 63 others
    python -m bench.load --floor                           # a bare grpc.aio server

Every answer is compared with what the server said to the same request alone. Processor times are the
server's; on a machine that others use they tell more than messages per second. "host" is all but the model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from bench.load import figures, floor, streams, with_ghz
from bench.load.figures import Level, percentile
from bench.load.process import cpu, memory
from bench.load.streams import Seen
from bench.probes.updates import address_of
from penstock.v1 import inference_pb2_grpc

_ROOTS = ("protos", "service", "runtime", "clients/python", "")
_SETTLE_S = 1.5
"""How long streams run before they are measured."""
_SLOW_S = 1.0
"""How long the slow reader waits after each message."""

Caller = Callable[[Any, int, Any, int, Seen], Awaitable[None]]


@contextlib.contextmanager
def server(tree: Path, *command: str, log: Path) -> Iterator[tuple[str, int]]:
    """Run a server of a worktree, and yield its address and process id."""
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(str(tree / root) for root in _ROOTS)
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": path}, cwd=tree,
            stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    try:
        yield address_of(process), process.pid
    finally:
        process.terminate()
        process.wait(60)


async def measured(
    name: str, callers: Sequence[Awaitable[None]], seen: Seen, pid: int, seconds: float, empty: int = 0
) -> Level:
    """Run callers for a while. `empty`: the server's memory before, in bytes; 0: it is not asked for."""
    async with streams.running(callers):
        await asyncio.sleep(_SETTLE_S)
        before, used, own, began = seen.copy(), cpu(pid), time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        took = time.perf_counter() - began
        level = Level(
            name,
            len(callers),
            took,
            seen.since(before),
            cpu(pid) - used,
            time.process_time() - own,
            (memory(pid) - empty) / len(callers) if empty else 0.0,
        )
    if not level.seen.messages:
        raise RuntimeError("no messages came")
    return level


async def levels(address: str, pid: int, options: argparse.Namespace) -> None:
    """Measure all levels, with Stream and with Generate; print a line for each."""
    async with contextlib.AsyncExitStack() as stack:
        # otherwise channels to the same address share a connection
        own = [("grpc.use_local_subchannel_pool", 1)]
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=own))
            for _ in range(options.connections)
        ]
        stubs: list[Any] = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        answers = await streams.references(stubs[0], options.tokens)
        print(figures.head(), flush=True)
        ways: Sequence[tuple[str, Caller]] = [
            ("Stream", streams.stream_on),
            ("Generate", streams.generate_on),
        ]
        for name, caller in ways:
            for count in options.streams:
                seen, empty = Seen(), memory(pid)
                callers = [
                    caller(stubs[number % len(stubs)], number, answers, options.tokens, seen)
                    for number in range(count)
                ]
                level = await measured(name, callers, seen, pid, options.seconds, empty)
                print(figures.row(level), flush=True)


async def slow(address: str, pid: int, options: argparse.Namespace) -> None:
    """Measure the time between messages of 63 streams, beside one more like them and beside a slow reader, in
    turns.
    """
    count = max(options.streams)
    found: dict[str, list[float]] = {"fast": [], "slow": []}
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        answers = await streams.references(stub, options.tokens)
        for turn in range(2 * options.rounds):
            which = ("fast", "slow")[(turn + turn // 2) % 2]
            seen, apart = Seen(), Seen()
            callers: list[Any] = [
                streams.stream_on(stub, number, answers, options.tokens, seen) for number in range(count - 1)
            ]
            if which == "slow":
                callers.append(streams.read_slowly(stub, _SLOW_S))
            else:
                callers.append(streams.stream_on(stub, count, answers, options.tokens, apart))
            level = await measured(which, callers, seen, pid, options.seconds)
            found[which].append(percentile(level.seen.gaps, 0.99))
    print(f"p99 between messages of {count - 1} streams, ms, in {options.rounds} rounds")
    for which, times in found.items():
        each = ", ".join(f"{1e3 * seconds:.1f}" for seconds in times)
        print(f"beside a {which} reader: {1e3 * median(times):.1f} ({each})")
    ratios = [s / f for f, s in zip(found["fast"], found["slow"], strict=True)]
    print(f"slow against fast, median of the rounds: {100 * (median(ratios) - 1):+.1f} %")


async def bare(address: str, pid: int, options: argparse.Namespace) -> None:
    """Measure the levels on the bare server."""

    async def read_on(channel: grpc.aio.Channel, seen: Seen) -> None:
        call: Any = channel.unary_stream(floor.METHOD)
        while True:
            async for _ in call(b""):
                seen.messages += 1

    async with grpc.aio.insecure_channel(address) as channel:
        print(figures.head(), flush=True)
        for count in options.streams:
            seen = Seen()
            callers = [read_on(channel, seen) for _ in range(count)]
            print(figures.row(await measured("bare", callers, seen, pid, options.seconds)), flush=True)


def by_ghz(address: str, pid: int, options: argparse.Namespace) -> None:
    """Measure all levels with ghz; print a line for each."""
    print(with_ghz.head(), flush=True)
    for method in ("Stream", "Generate"):
        for count in options.streams:
            requests = max(count * options.ghz_requests, 32)
            report = with_ghz.run(
                options.ghz, address, pid,
                method=method, streams=count, requests=requests, tokens=options.tokens,
            )  # fmt: skip
            print(with_ghz.row(report), flush=True)


def main() -> int:
    described = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=described)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 256], metavar="N")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="default: %(default)s")
    parser.add_argument(
        "--connections",
        type=int,
        default=1,
        metavar="N",
        help="that the streams are spread over; each of a server's front processes takes some; "
        "default: %(default)s",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of --slow; default: %(default)s")
    parser.add_argument("--slow", action="store_true", help="one of the streams is read slowly")
    parser.add_argument("--floor", action="store_true", help="a bare grpc.aio server instead of ours")
    parser.add_argument("--ghz", type=Path, metavar="PROGRAM", help="run ghz, too")
    parser.add_argument("--ghz-requests", type=int, default=16, metavar="N", help="for each stream")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2], help="default: this one")
    parser.add_argument("--serve", nargs="+", default=[], metavar="ARGUMENT", help="more for penstock serve")
    parser.add_argument("--log", type=Path, default=Path("bench/out/load.log"), help="%(default)s")
    options = parser.parse_args()
    slots = ["--max-num-seqs", str(max(options.streams))]
    command = ["-m", "penstock.cli", "serve", "demo", "--port", "0", *slots, *options.serve]
    if options.floor:
        command = ["-m", "bench.load.floor"]
    with server(options.tree.resolve(), *command, log=options.log) as (address, pid):
        asyncio.run((bare if options.floor else slow if options.slow else levels)(address, pid, options))
        if options.ghz and not (options.floor or options.slow):
            by_ghz(address, pid, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
