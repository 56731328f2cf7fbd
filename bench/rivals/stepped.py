"""Drives an engine that its caller steps, such as vLLM's LLMEngine and OpenVINO's pipeline."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from bench.drivers.session import Session, add_arguments, chosen, measure
from bench.measures import record
from bench.workloads import Job
from penstock.cli.measuring.stats import RequestTrace


class SteppedEngine(Protocol):
    """An engine that its caller steps. Requests are known by a number that is never used twice."""

    def add(self, number: int, job: Job) -> None:
        """Queue a greedy request that ignores end tokens."""
        ...

    def step(self) -> Mapping[int, int]:
        """Run one step and return how many tokens each request got."""
        ...


class SteppedDriver:
    """A `bench.session.Driver` on a stepped engine."""

    def __init__(self, engine: SteppedEngine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._clock = clock
        self._next = 0

    def run_wave(self, jobs: Sequence[Job]) -> list[RequestTrace]:
        first, self._next = self._next, self._next + len(jobs)
        sent: dict[int, float] = {}
        arrivals: dict[int, list[tuple[float, int]]] = {number: [] for number in range(first, self._next)}
        counts = dict.fromkeys(arrivals, 0)
        early = [first + i for i, job in enumerate(jobs) if not job.after_tokens]
        while any(counts[first + i] < job.max_tokens for i, job in enumerate(jobs)):
            for number, job in enumerate(jobs, first):
                if number not in sent and all(counts[i] >= job.after_tokens for i in early):
                    sent[number] = self._clock()
                    self._engine.add(number, job)
            made = self._engine.step()
            now = self._clock()
            for number, count in made.items():
                if count:
                    arrivals[number].append((now, count))
                    counts[number] += count
        return [
            RequestTrace(sent[n], tuple(arrivals[n]), arrivals[n][-1][0], len(job.token_ids))
            for n, job in enumerate(jobs, first)
        ]

    def about_repeat(self) -> Mapping[str, Any]:
        return {"peak_rss_bytes": record.peak_rss_bytes(os.getpid())}


def run(
    name: str,
    packages: tuple[str, ...],
    options: Mapping[str, Any],
    start: Callable[[str, Mapping[str, Any]], SteppedEngine],
) -> int:
    """Run the command line of a runner. `start(checkpoint, options)` makes the engine."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.rivals {name}")
    add_arguments(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help=f"an option of the engine; default: {dict(options)}",
    )
    args = parser.parse_args()
    pairs = [text.partition("=") for text in args.set]
    given = dict(options) | {key: json.loads(value) for key, _, value in pairs}
    began = time.perf_counter()
    engine = start(args.checkpoint, given)
    session = Session(
        engine=args.label or name,
        options=given,
        startup={"ready_s": round(time.perf_counter() - began, 2)},
        packages=packages,
        workloads=chosen(args),
        repeats=args.repeats,
        num_words=args.num_words,
        output=args.out,
    )
    return 0 if measure(SteppedDriver(engine), session) else 1
