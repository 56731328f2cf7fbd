"""Measures what watching a server costs: metrics, and each level of traces.

    python -m bench.probes.watching                                                  # the demo, 64 streams
    python -m bench.probes.watching --checkpoint bench/out/model --streams 16 --prompt 128 --tokens 64

Two servers of the same model run: one that nothing watches, and one with metrics and traces, whose level is
changed between the runs and whose collector drops everything. Streams are sent to one of them at a time, for
some seconds, in an order that turns with each round. What counts is each way's tokens per second against the
bare server's of the same round, and the processor time that the server took for 1,000 tokens. Two processes
of one server may differ by several percent, so compare levels with each other, which are in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from bench.drivers import options
from bench.drivers.options import serve_arguments
from bench.probes.updates import address_of, child
from penstock.v1 import (
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    telemetry_pb2,
    types_pb2,
)

BARE = "nothing"
LEVELS: Mapping[str, telemetry_pb2.TraceLevel.ValueType] = {
    "metrics": telemetry_pb2.TRACE_LEVEL_OFF,
    "metrics, traces of requests": telemetry_pb2.TRACE_LEVEL_REQUESTS,
    "metrics, traces of steps": telemetry_pb2.TRACE_LEVEL_STEPS,
    "metrics, detailed traces": telemetry_pb2.TRACE_LEVEL_DETAILED,
}
_SETTLE_S = 1.0
"""How long streams run before they are measured."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent."""

    streams: int
    prompt: int
    """Tokens of a prompt."""
    tokens: int
    """Tokens of an output."""
    seconds: float
    """How long is measured."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of one run."""

    tokens_per_s: float
    cpu_ms: float
    """Processor time of the server in ms for 1,000 tokens."""


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def stream_on(stub: Any, load: Load, vocab: int, number: int, count: list[int]) -> None:
    """Stream one request after the other until it is cancelled, and add their tokens to `count[0]`."""
    turn = 0
    while True:
        turn += 1
        ids = [(7919 * number + 104729 * turn + 31 * i) % vocab for i in range(load.prompt)]
        request = inference_pb2.StreamRequest(
            prompt_token_ids=types_pb2.TokenIds(ids=ids),
            sampling=types_pb2.SamplingParams(temperature=0),
            stopping=types_pb2.StoppingParams(max_tokens=load.tokens, ignore_eos=True),
        )
        async for message in stub.Stream(request):
            count[0] += len(message.delta.token_ids) if message.HasField("delta") else 0


async def measured(
    address: str, pid: int, load: Load, level: telemetry_pb2.TraceLevel.ValueType | None
) -> Measured:
    """Stream to a server for a while. `level` None: the server has no traces."""
    async with grpc.aio.insecure_channel(address) as channel:
        control: Any = control_pb2_grpc.ControlServiceStub(channel)
        if level is not None:
            await control.SetTracing(telemetry_pb2.SetTracingRequest(level=level))
        info = await control.GetModelInfo(control_pb2.GetModelInfoRequest())
        stub, count = inference_pb2_grpc.InferenceServiceStub(channel), [0]
        tasks = [
            asyncio.create_task(stream_on(stub, load, info.vocab_size, number, count))
            for number in range(load.streams)
        ]
        try:
            await asyncio.sleep(_SETTLE_S)
            began, tokens, busy_s = time.perf_counter(), count[0], cpu_s(pid)
            await asyncio.sleep(load.seconds)
            made, seconds = count[0] - tokens, time.perf_counter() - began
            busy_s = cpu_s(pid) - busy_s
            if failed := [task for task in tasks if task.done()]:
                failed[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    if not made:
        raise RuntimeError("no tokens came")
    return Measured(made / seconds, 1e6 * busy_s / made)


def table(rounds: Sequence[Mapping[str, Measured]]) -> str:
    """Show for each way the medians over the rounds, and the cost against the bare server of the same
    round.
    """
    lines = [
        "| watched by | tokens/s | CPU ms per 1,000 tokens | cost in tokens/s, % | each round, % |",
        "|---|---:|---:|---:|---|",
    ]
    for way in rounds[0]:
        costs = [100 * (1 - turn[way].tokens_per_s / turn[BARE].tokens_per_s) for turn in rounds]
        speed = median(turn[way].tokens_per_s for turn in rounds)
        cpu = median(turn[way].cpu_ms for turn in rounds)
        each = ", ".join(f"{cost:.1f}" for cost in costs)
        lines.append(f"| {way} | {speed:,.0f} | {cpu:,.1f} | {median(costs):.1f} | {each} |")
    return "\n".join(lines)


async def compared(
    servers: Mapping[str, tuple[str, int, telemetry_pb2.TraceLevel.ValueType | None]], load: Load, rounds: int
) -> list[dict[str, Measured]]:
    """Measure all ways in turns, after a round that does not count. `servers`: for each way an address, the
    server's process and the level of its traces.
    """
    found: list[dict[str, Measured]] = []
    ways = list(servers)
    for number in range(-1, rounds):
        turn = number % len(ways)
        order = ways[turn:] + ways[:turn]
        results = {way: await measured(*servers[way][:2], load, servers[way][2]) for way in order}
        found.append({way: results[way] for way in ways})
    return found[1:]


def server_command(model: str, *flags: str) -> tuple[str, ...]:
    return ("-m", "penstock.cli", "serve", model, "--port", "0", "--log-level", "warning", *flags)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes.watching", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--checkpoint", metavar="DIR", help="see bench.checkpoint; default: the demo model")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompt", type=int, default=64, metavar="N", help="tokens; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="default: %(default)s")
    parser.add_argument("--logs", type=Path, default=Path("bench/out"), metavar="DIR", help="%(default)s")
    args = parser.parse_args()
    engine = serve_arguments(options.DEFAULTS) if args.checkpoint else ["--max-num-seqs", str(args.streams)]
    model = args.checkpoint or "demo"
    with contextlib.ExitStack() as stack:

        def started(name: str, *command: str) -> tuple[str, subprocess.Popen[str]]:
            process = stack.enter_context(child(*command, log=args.logs / f"watching_{name}.log"))
            return address_of(process), process

        sink, _ = started("sink", "-m", "bench.probes.watching.sink")
        bare, bare_process = started("bare", *server_command(model, "--no-metrics", *engine))
        watch = ("--otlp-endpoint", f"http://{sink}", "--metrics-port", "0")
        watched, process = started("watched", *server_command(model, *watch, *engine))
        servers: dict[str, tuple[str, int, telemetry_pb2.TraceLevel.ValueType | None]] = {
            BARE: (bare, bare_process.pid, None)
        }
        servers |= {way: (watched, process.pid, level) for way, level in LEVELS.items()}
        load = Load(args.streams, args.prompt, args.tokens, args.seconds)
        rounds = asyncio.run(compared(servers, load, args.rounds))
    print(
        f"{args.streams} streams of {args.prompt} + {args.tokens} tokens on {model}, {args.rounds} rounds\n"
    )
    print(table(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
