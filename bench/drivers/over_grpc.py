"""Drives `penstock serve` in its own process through the asyncio client, to measure what users of a server
get.
"""

from __future__ import annotations

import asyncio
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


class OverGrpc:
    """A running server, and a client's connection to it."""

    def __init__(self, checkpoint: str, options: Mapping[str, Any], log: Path) -> None:
        """Start the server and wait for it; its log goes to `log`. Raises RuntimeError if it does not come
        up.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "penstock.cli", "serve", checkpoint, "--port", "0"]
        began = time.perf_counter()
        with log.open("w") as errors:
            self._server = subprocess.Popen(
                [*command, *serve_arguments(options)], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self._server.stdout is not None
        line = next((line for line in self._server.stdout if line.startswith(_READY)), None)
        if line is None:
            raise RuntimeError(f"the server ended with {self._server.wait()}; see {log}")
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
        return {"peak_rss_bytes": peak_rss_bytes(self._server.pid), **counts}

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()
        self._server.terminate()
        try:
            self._server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._server.kill()


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
