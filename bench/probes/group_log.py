"""Measures what the dispatch log of a group costs its leader in each step.

    python -m bench.probes.group_log --rows 64

A server without an engine leads, and a process of its own follows, which drops the calls. A thread in place
of the engine's appends the buffer of a step of so many rows, at a steady pace. Printed are the times of
`append`, which the engine's thread waits for, and the processor time of the leader's process for each step:
of all threads, of the one that appends, and of the event loop's. The others are gRPC's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

from penstock.cli.measuring.stats import percentile
from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.step_buffer import Layout
from penstock.runtime.following.interface import Call, GroupOptions, Kind
from penstock.service.group.leader import GroupLeader
from penstock.service.group.link import FollowerLink
from penstock.service.options import ServerOptions
from penstock.service.server import PenstockServer
from penstock.service.threads.lanes import in_thread

TARGET_MS = 0.2
ROOT = Path(__file__).parents[2]


def group(process_id: int) -> GroupOptions:
    return GroupOptions(processes=2, process_id=process_id, coordinator="127.0.0.1:1")


def follow(address: str) -> None:
    """Take the calls of the leader at this address until it stops."""
    with grpc.insecure_channel(address) as channel:
        link = FollowerLink(channel, (), group(1), lambda error: None)
        link.meet({})
        link.begin({})
        for _ in link.calls():
            pass


class Measured(NamedTuple):
    """Milliseconds: of each `append`, and of processor time for each step."""

    appends_ms: list[float]
    process_ms: float
    appending_ms: float
    loop_ms: float


async def measure(rows: int, steps: int, per_second: float, *, with_log: bool) -> Measured:
    """Measure some steps."""
    leader = GroupLeader(group(0), lambda error: None)
    server = PenstockServer(ServerOptions(port=0), group=leader)
    await server.start()
    follower = subprocess.Popen(  # noqa: ASYNC220 -- it starts in a moment, and nothing else happens meanwhile
        [sys.executable, "-m", "bench.probes.group_log", "--follow", server.address], cwd=ROOT
    )
    await in_thread(lambda: leader.meet({}))
    await in_thread(lambda: leader.begin({}))
    key = ProgramKey(rows, rows, decode_only=True, window=True)
    size = Layout(key).size
    gc.collect()
    gc.freeze()  # as a server does when it has started, so that collections walk little

    def run() -> tuple[list[float], float, float]:
        times, began_s = [], time.monotonic()
        cpu_s, thread_s = time.process_time(), time.thread_time()
        for step in range(steps):
            packed = np.full(size, step, np.int32)
            started_ns = time.perf_counter_ns()
            if with_log:
                leader.append(Call(Kind.WINDOW, key.name, (packed,)))
            times.append((time.perf_counter_ns() - started_ns) / 1e6)
            time.sleep(max(0.0, began_s + (step + 1) / per_second - time.monotonic()))
        return times, time.process_time() - cpu_s, time.thread_time() - thread_s

    loop_s = time.thread_time()
    times, process_s, appending_s = await in_thread(run)
    loop_s = time.thread_time() - loop_s
    await server.stop()
    follower.wait()
    return Measured(times, *(spent_s / steps * 1e3 for spent_s in (process_s, appending_s, loop_s)))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes.group_log", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--rate", type=float, default=100.0, metavar="HZ", help="steps a second; default: %(default)g"
    )
    parser.add_argument("--follow", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.follow is not None:
        follow(args.follow)
        return 0
    busy = asyncio.run(measure(args.rows, args.steps, args.rate, with_log=True))
    idle = asyncio.run(measure(args.rows, args.steps, args.rate, with_log=False))
    shown = ", ".join(f"p{p} {percentile(busy.appends_ms, p):.3f}" for p in (50, 90, 99))
    print(f"append, ms: {shown}")
    cost_ms = busy.process_ms - idle.process_ms
    print(f"processor time of the leader's process, ms a step: {cost_ms:.3f} (target: below {TARGET_MS:g})")
    print(
        f"of that, the thread that appends: {busy.appending_ms - idle.appending_ms:.3f}, "
        f"the event loop's: {busy.loop_ms - idle.loop_ms:.3f}"
    )
    return int(cost_ms > TARGET_MS)


if __name__ == "__main__":
    sys.exit(main())
