"""Drives `penstock serve` through the asyncio client, to measure what users of a server get.

The server is one process or, with the option `processes`, a group of several on this machine, each of which
has its share of the processors.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.drivers.options import serve_arguments
from bench.measures.record import peak_rss_bytes
from bench.workloads import Job
from penstock.cli.measuring.stats import RequestTrace
from penstock.client import AsyncClient, Delta, PenstockClientError, Summary, Usage

_READY = "penstock: ready on "
_STOP_S = 30.0


def free_port() -> int:
    """Find a port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def server_flags(options: Mapping[str, Any]) -> list[list[str]]:
    """Return the flags of `penstock serve` for each process of the server, beginning with the one that takes
    requests. There is one, unless the options have `processes`.
    """
    shared, processes = serve_arguments(options), options.get("processes", 1)
    if processes == 1:
        return [["--port", "0", *shared]]
    shared += ["--port", str(free_port()), "--coordinator", f"127.0.0.1:{free_port()}"]
    return [[*shared, "--process-id", str(number)] for number in range(processes)]


def shares_of(processors: Sequence[int], processes: int) -> list[list[int]]:
    """Deal the processors to so many processes. Raises ValueError if there are fewer."""
    if len(processors) < processes:
        raise ValueError(f"processes: there are {len(processors)} processors for {processes}")
    return [list(processors[number::processes]) for number in range(processes)]


class OverGrpc:
    """A running server, and a client's connection to it."""

    def __init__(self, checkpoint: str, options: Mapping[str, Any], log: Path) -> None:
        """Start the server and wait for it; its log goes to `log`, and that of further processes beside it.
        Raises RuntimeError if it does not come up, and ValueError if there are fewer processors than
        processes.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        flags = server_flags(options)
        shares = shares_of(sorted(os.sched_getaffinity(0)), len(flags)) if len(flags) > 1 else []
        began = time.perf_counter()
        self._processes: list[subprocess.Popen[str]] = []
        """Of the server, first the one that takes requests."""
        for number, own in enumerate(flags):
            with log.with_suffix(f".{number}{log.suffix}" if number else log.suffix).open("w") as errors:
                server = subprocess.Popen(
                    [sys.executable, "-m", "penstock.cli", "serve", checkpoint, *own],
                    stdout=errors if number else subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            if shares:
                os.sched_setaffinity(server.pid, shares[number])
            self._processes.append(server)
        leader = self._processes[0]
        assert leader.stdout is not None
        line = next((line for line in leader.stdout if line.startswith(_READY)), None)
        if line is None:
            code = leader.wait()
            self._end()
            raise RuntimeError(f"the server ended with {code}; see {log}")
        self.startup = {"ready_s": round(time.perf_counter() - began, 2)}
        self._proposed_tokens = self._accepted_tokens = 0
        self._runner = asyncio.Runner()
        self._client = self._runner.run(_connect(line.removeprefix(_READY).strip()))

    def run_wave(self, jobs: Sequence[Job]) -> list[RequestTrace]:
        traces, usages = self._runner.run(_wave(self._client, jobs))
        for usage in usages:  # of an older client perhaps (`bench.compare`), which has no such numbers
            self._proposed_tokens += getattr(usage, "proposed_tokens", 0)
            self._accepted_tokens += getattr(usage, "accepted_tokens", 0)
        return traces

    def about_repeat(self) -> Mapping[str, Any]:
        counts = {"proposed_tokens": self._proposed_tokens, "accepted_tokens": self._accepted_tokens}
        self._proposed_tokens = self._accepted_tokens = 0
        peak_bytes = sum(peak_rss_bytes(process.pid) for process in self._processes)
        return {"peak_rss_bytes": peak_bytes, **counts}

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()
        self._end()

    def _end(self) -> None:
        self._processes[0].terminate()  # which tells the others
        for process in self._processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


async def _connect(address: str) -> AsyncClient:
    return AsyncClient(address)


class _Early:
    """Lets late jobs wait until every early job has generated enough tokens."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._counts = {i: 0 for i, job in enumerate(jobs) if not job.after_tokens}
        self._changed = asyncio.Condition()

    async def add(self, index: int, count: int) -> None:
        if index in self._counts:
            async with self._changed:
                self._counts[index] += count
                self._changed.notify_all()

    async def reached(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: all(have >= count for have in self._counts.values()))


async def _wave(client: AsyncClient, jobs: Sequence[Job]) -> tuple[list[RequestTrace], list[Usage]]:
    early = _Early(jobs) if any(job.after_tokens for job in jobs) else None

    usages: list[Usage] = []

    async def one(index: int, job: Job) -> RequestTrace:
        if early is not None and job.after_tokens:
            await early.reached(job.after_tokens)
        arrivals: list[tuple[float, int]] = []
        error = None
        sent = time.perf_counter()
        try:
            stream = client.stream(
                token_ids=job.token_ids,
                max_tokens=job.max_tokens,
                ignore_eos=True,
                temperature=0.0,
                return_text=False,
                return_token_ids=True,
            )
            async for event in stream:
                if isinstance(event, Delta) and event.token_ids:
                    arrivals.append((time.perf_counter(), len(event.token_ids)))
                    if early is not None:
                        await early.add(index, len(event.token_ids))
                elif isinstance(event, Summary):
                    usages.append(event.usage)
        except PenstockClientError as failure:
            error = str(failure)
        return RequestTrace(sent, tuple(arrivals), time.perf_counter(), len(job.token_ids), error)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index, job)) for index, job in enumerate(jobs)]
    return [task.result() for task in tasks], usages
