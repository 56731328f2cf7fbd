"""Runs workloads on a driver and records the figures, in the same way for every engine.

Needs only the standard library and Penstock's sources: see `bench.measures.figures`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.measures import record
from bench.measures.figures import figures, table
from bench.workloads import MAIN, WARMUP, Job, Workload, select, shrunk, waves
from penstock.cli.measuring.stats import RequestTrace

NUM_WORDS = 151_643
"""Token ids of prompts are below this: they are text in every Qwen tokenizer, and not control tokens."""
_LONGEST_ERROR = 300


class Driver(Protocol):
    """An engine that is up. The times of traces are those of `time.perf_counter`."""

    def run_wave(self, jobs: Sequence[Job]) -> list[RequestTrace]:
        """Submit all jobs at once (late ones when they are due) and wait for all. Returns the traces in the
        order of the jobs.
        """
        ...

    def about_repeat(self) -> Mapping[str, Any]:
        """Return facts about the repeat that has just ended, such as `peak_rss_bytes`. `proposed_tokens` and
        `accepted_tokens` are those of the requests since the last call.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One engine with fixed options, and how it is measured."""

    engine: str
    options: Mapping[str, Any]
    startup: Mapping[str, Any]
    packages: tuple[str, ...]
    workloads: tuple[Workload, ...]
    repeats: int = 3
    num_words: int = NUM_WORDS
    output: Path | None = None
    say: Callable[[str], None] = field(default=print)


def measure(driver: Driver, session: Session) -> dict[str, list[dict[str, float]]]:
    """Run one warm-up and the repeats of each workload, and return the figures of the repeats by workload
    name.

    A workload that fails is reported and left out, so that the others still count.
    """
    about = {
        "engine": session.engine,
        "machine": record.machine(),
        "versions": record.versions(session.packages),
        "commit": record.commit(),
        "options": dict(session.options),
        "startup": dict(session.startup),
    }
    results: dict[str, list[dict[str, float]]] = {}
    for workload in session.workloads:
        try:
            for repeat in range(WARMUP, session.repeats):
                found = one_repeat(driver, workload, repeat, session.num_words)
                more = dict(driver.about_repeat())
                if repeat == WARMUP:
                    continue
                results.setdefault(workload.name, []).append(found)
                named = ", ".join(f"{name} {found[name]:.4g}" for name in workload.figures if name in found)
                session.say(f"{workload.name} repeat {repeat}: {named}{proposals(more)}")
                if session.output is not None:
                    line = {"workload": workload.name, "title": workload.title, "repeat": repeat}
                    record.write_line(session.output, line | {"figures": found} | more | about)
        except ValueError as error:
            session.say(f"{workload.name} failed: {shortened(str(error))}")
    session.say(f"\n{session.engine} ({about['commit']}), {dict(session.startup)}\n\n{table(results)}")
    return results


def proposals(about: Mapping[str, Any]) -> str:
    """Describe what was proposed in a repeat, as an end of its line; empty where nothing was."""
    counts = about.get("proposed_tokens"), about.get("accepted_tokens")
    return "" if not counts[0] else f", {counts[1]} of {counts[0]} proposed tokens accepted"


def all_ran(results: Mapping[str, Sequence[Any]], session: Session) -> bool:
    """Say whether `measure` returned all repeats of all workloads."""
    return all(len(results.get(workload.name, ())) == session.repeats for workload in session.workloads)


def shortened(message: str) -> str:
    """Cut the message to a length that a terminal can show: one about token ids lists all of them."""
    return message if len(message) <= _LONGEST_ERROR else f"{message[:_LONGEST_ERROR]}..."


def one_repeat(driver: Driver, workload: Workload, repeat: int, num_words: int) -> dict[str, float]:
    """Return the figures of one repeat. Raises ValueError if a request failed."""
    planned = waves(workload, repeat, num_words)
    return figures(planned[0], [driver.run_wave(wave) for wave in planned])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that every runner of one engine has."""
    add_workload_arguments(parser)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="after one warm-up; default: 3")
    parser.add_argument(
        "--label", metavar="TEXT", help="the engine's name in records; give one when options differ"
    )


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for what is run and where it is recorded."""
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="see bench.checkpoint")
    parser.add_argument(
        "--workloads",
        default=",".join(MAIN),
        metavar="W1,W2",
        help='names, or "main" (the default), "concurrency", "large" or "speculation"',
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="append JSON lines, one per repeat")
    parser.add_argument(
        "--shrink", type=int, default=1, metavar="N", help="divide lengths, to try a runner; default: 1"
    )
    parser.add_argument(
        "--num-words",
        type=int,
        default=NUM_WORDS,
        metavar="N",
        help="prompts use token ids below this; default: %(default)s, for the Qwen3 shape",
    )


def chosen(args: argparse.Namespace) -> tuple[Workload, ...]:
    """Return the workloads that the arguments name. Raises ValueError for an unknown name."""
    workloads = select(args.workloads.split(","))
    return tuple(shrunk(workload, args.shrink) for workload in workloads) if args.shrink > 1 else workloads
