"""Measures how long the host works for each decode step, with many rows.

    python -m bench.probes.host --rows 64

It runs an engine on a model with as many arrays as Qwen3-0.6B and next to no work, so that little but the
host's share is left: scheduling, packing and calling the program, committing, delivering. Waiting for the
program is shown, and is not part of that share.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from bench.checkpoint import SHAPES, write_checkpoint
from bench.drivers import options
from bench.drivers.inprocess import InProcess
from bench.measures.steps import PHASES, phases_us
from bench.workloads import Group, Workload, jobs
from penstock.cli.measuring.stats import percentile

TARGET_US = 300.0
HOST = ("schedule", "pack", "dispatch", "commit", "deliver")
_PROMPT, _OUTPUT = 16, 256


def timed(work: Callable[..., Any], microseconds: list[float]) -> Callable[..., Any]:
    """Wrap a function so that it records how long each call takes."""

    def call(*args: Any) -> Any:
        began = time.perf_counter_ns()
        result = work(*args)
        microseconds.append((time.perf_counter_ns() - began) / 1e3)
        return result

    return call


def table(steps: Sequence[Mapping[str, float]]) -> str:
    """Write p50, p90 and p99 of each phase of `phases_us`, and of the host's phases together."""
    rows = {name: [step[name] for step in steps if name in step] for name in PHASES}
    rows["host, all"] = [sum(step[name] for name in HOST) for step in steps if step.keys() >= set(HOST)]
    lines = [f"{'microseconds per step':<24}{'p50':>10}{'p90':>10}{'p99':>10}"]
    for name, values in rows.items():
        if not values:
            continue
        cells = "".join(f"{percentile(values, p):>10.1f}" for p in (50, 90, 99))
        lines.append(f"{name:<24}{cells}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.probes.host", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an engine option, as for bench.run"
    )
    args = parser.parse_args()
    workload = Workload("host", "", (Group(args.rows, (_PROMPT, _PROMPT), (_OUTPUT, _OUTPUT)),), ())
    given = {
        "max_num_seqs": args.rows,
        "max_num_batched_tokens": max(args.rows, 16),
        "max_model_len": _PROMPT + _OUTPUT,
        "kv_cache_bytes": 2**29,
    }
    config = options.engine_config(given | options.parse(args.set))
    shape = SHAPES["slim"]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        write_checkpoint(Path(folder), shape)
        driver = InProcess(folder, config)
    steps: list[Mapping[str, float]] = []
    for repeat in range(-1, args.repeats):
        if repeat == 0:
            steps.clear()
        driver.run_wave(jobs(workload, repeat, shape.num_words))
        records = driver.take_steps()
        of_interest = [record.decode_only and record.num_rows == args.rows for record in records]
        steps += compress(phases_us(records), of_interest)
    driver.close()
    print(f"{len(steps)} decode steps of {args.rows} rows; the target is {TARGET_US:.0f} us for the host\n")
    print(table(steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
