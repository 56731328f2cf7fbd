"""Measures what a long queue costs: each schedule() of an engine, and the waits of GetLoad and submit.

    python -m bench.probes.scheduler --waiting 1000 --prefix 16384

All requests share a prefix that the first one computes in chunks, while the others wait for it. The device is
a stand-in that takes `--step-ms` for a step, so little but the scheduler is measured. It runs until half of
the requests have their first tokens. A wall time of schedule() far above its CPU time means sleeping, waiting
for a lock, or a busy machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.probes.host import timed
from penstock.cli.measuring.stats import percentile
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import StepShape
from penstock.runtime.requests.request import Request, StepOutput, StoppingParams
from penstock.runtime.scheduling.plan import Plan, StepResult
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig

_VOCAB, _PAGE, _SUFFIX, _OUTPUT = 32_000, 16, 16, 32


@dataclass(frozen=True, slots=True)
class _Step:
    plan: Plan
    packed_ns: int
    shape: StepShape | None = None
    awaits_choice: bool = False
    is_done: bool = False
    skipped: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()


class _Device:
    """Stands for the runner."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def start(self) -> None:
        """Do nothing."""

    def execute_async(self, plan: Plan) -> _Step:
        return _Step(plan, time.monotonic_ns())

    def choose(self, step: _Step) -> _Step:
        return step

    def wait(self, step: _Step) -> StepResult:
        time.sleep(self._step_s)
        rows = step.plan.rows
        return StepResult([(7,) * row.max_samples if row.samples else () for row in rows], [()] * len(rows))

    def free_kv_cache(self) -> int:
        return 0

    def restore_kv_cache(self) -> None:
        """Do nothing."""

    def offload_weights(self) -> int:
        return 0

    def restore_weights(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes.scheduler", description=__doc__.split("\n")[0]
    )
    for name, default in (
        ("waiting", 1000),
        ("prefix", 16_384),
        ("chunk", 512),
        ("budget", 2048),
        ("rows", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")
    parser.add_argument("--step-ms", type=float, default=20.0, metavar="MS", help="default: %(default)s")
    args = parser.parse_args()
    pages_per_row = -(-(args.prefix + _SUFFIX + _OUTPUT) // _PAGE)
    config = SchedulerConfig(
        max_num_seqs=args.rows,
        max_num_batched_tokens=args.budget,
        max_model_len=args.prefix + 1024,
        page_size=_PAGE,
        num_pages=2 * pages_per_row + 8 * args.rows,
        eos_token_ids=frozenset({0}),
        max_queued_requests=args.waiting + 1,
        max_prefill_chunk=args.chunk,
    )
    scheduler = Scheduler(config)
    us: dict[str, list[float]] = {"submit": [], "schedule": [], "schedule, cpu": [], "load": []}
    whole: Any = scheduler
    whole.schedule = _timed_schedule(scheduler, us["schedule"], us["schedule, cpu"])
    core = EngineCore(_Device(args.step_ms / 1e3), scheduler, vocab_size=_VOCAB)
    begun: set[str] = set()
    half = threading.Event()

    def sink(outputs: Sequence[StepOutput]) -> None:
        begun.update(output.request_id for output in outputs)
        if len(begun) >= args.waiting // 2:
            half.set()

    rng = random.Random(0)
    prefix = tuple(rng.choices(range(10, _VOCAB), k=args.prefix))
    core.start()
    submit, load = timed(core.submit, us["submit"]), timed(core.load, us["load"])
    for i in range(args.waiting):
        prompt = (*prefix, *rng.choices(range(10, _VOCAB), k=_SUFFIX))
        submit(Request(f"r{i}", prompt, stopping=StoppingParams(max_tokens=_OUTPUT)), sink)
        load()
    while not half.wait(0.002):
        load()
    core.shutdown()
    print(f"{args.waiting} requests on a prefix of {args.prefix} tokens\n")
    print(f"{'milliseconds':<16}{'calls':>10}{'p50':>10}{'p99':>10}{'max':>10}")
    for name, values in us.items():
        cells = "".join(
            f"{value / 1e3:>10.3f}" for value in (*(percentile(values, p) for p in (50, 99)), max(values))
        )
        print(f"{name:<16}{len(values):>10}{cells}")
    return 0


def _timed_schedule(scheduler: Scheduler, wall_us: list[float], cpu_us: list[float]) -> Any:
    """Wrap `Scheduler.schedule` so that it records, for calls that made a plan, how long they took and how
    long their thread ran.
    """
    schedule = scheduler.schedule

    def call(*args: Any, **kwargs: Any) -> Plan | None:
        began, began_cpu = time.perf_counter_ns(), time.thread_time_ns()
        plan = schedule(*args, **kwargs)
        if plan is not None:
            cpu_us.append((time.thread_time_ns() - began_cpu) / 1e3)
            wall_us.append((time.perf_counter_ns() - began) / 1e3)
        return plan

    return call


if __name__ == "__main__":
    sys.exit(main())
