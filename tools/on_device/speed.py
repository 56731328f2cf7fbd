"""How fast the engine is, where the time of a decode step goes, and what memory it takes.

Steps of the run: `python -m tools.on_device.speed workload|profile|memory ...`. All use one compilation
cache, so that what one step has compiled, the next ones load.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from bench.drivers import options
from bench.drivers.inprocess import InProcess
from bench.drivers.session import NUM_WORDS, Session, all_ran, measure
from bench.measures import record
from bench.measures.figures import figures, medians
from bench.workloads import TABLE, Group, Workload, jobs, shrunk
from penstock.runtime import Engine
from penstock.runtime.loading.checkpoint import load_config
from tools.on_device.facts import COPY, wanted_device
from tools.on_device.limits import UNKNOWN, limits_of, of_workload
from tools.on_device.operations import Share, by_scope, device_events, of_decode_steps, shares
from tools.on_device.steps import Result

ENGINE = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 2304, "show_progress": False}
"""Options of the engine: rows for W2 and no more, because each bucket of rows is compiled for."""
MOST_OPERATIONS = 20
BESIDE = ("itl_p99_ms", "ttft_s", "wall_s")
"""Figures that are shown for each workload beside its own."""
SPREAD = ("median", "least", "most")
PROFILED_ROWS = (1, 16)
_PROMPT, _OUTPUT = 16, 96


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.on_device.speed", description=__doc__)
    parser.add_argument("what", choices=("workload", "profile", "memory"))
    parser.add_argument("--name", default="W1", help="of the workload")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True, help="where compiled programs are kept")
    parser.add_argument("--out", type=Path, required=True, help="the folder that gets traces")
    parser.add_argument(
        "--facts", type=Path, required=True, help="the result of the step that measured the limits"
    )
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--shrink", type=int, default=1, help="divides the workload's lengths")
    parser.add_argument("--native", default="auto", help="as with `penstock serve`")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    wanted_device()
    result = Result()
    result.say("it was loading or compiling")
    {"workload": workload, "profile": profile, "memory": memory}[args.what](result, args)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    given = {"compilation_cache": args.cache, "native": args.native, "kv_cache_bytes": args.kv_bytes}
    return {**ENGINE, **given}


def _started(result: Result, args: argparse.Namespace) -> InProcess:
    driver = InProcess(str(args.checkpoint), options.engine_config(_options(args)))
    result.add(device=", ".join(driver.engine.info.devices), start=driver.startup)
    result.say(f"compiled in {driver.startup['compile_s']} s, and nothing was measured")
    return driver


def workload(result: Result, args: argparse.Namespace) -> None:
    """Measure one of bench's workloads: its figures, and the parts of its steps on the host."""
    driver = _started(result, args)
    chosen = shrunk(TABLE[args.name], args.shrink) if args.shrink > 1 else TABLE[args.name]
    lines = result.file.with_suffix(".jsonl")
    session = Session(
        engine="penstock",
        options=_options(args),
        startup=driver.startup,
        packages=(),
        workloads=(chosen,),
        repeats=args.repeats,
        num_words=_num_words(args),
        output=lines,
    )
    found = measure(driver, session)
    if not all_ran(found, session):
        raise SystemExit(f"RuntimeError: {args.name} has failed")
    rows = medians(found[args.name])
    shown = [name for name in (*chosen.figures, *BESIDE) if name in rows]
    result.add(figures=[{"figure": name, **dict(zip(SPREAD, rows[name], strict=True))} for name in shown])
    result.say(", ".join(f"{name} {rows[name][0]:.4g}" for name in chosen.figures if name in rows))
    if len(chosen.groups) == 1:
        device = jax.devices()[0]
        limits = limits_of(device.platform, device.device_kind, args.facts)
        middle = {name: median for name, (median, _, _) in rows.items()}
        config = options.engine_config(_options(args))
        near = of_workload(chosen, middle, load_config(args.checkpoint), config, limits)
        result.add(limits=str(limits or UNKNOWN), **{"beside the limits": near})
    *_, last = record.read_lines(lines)
    result.add(compiles_after_warmup=last["compiles_after_warmup"])
    parts = [
        {"steps": kind, **{name: v for name, v in at.items() if "p50" in name}}
        for kind, at in last["steps"].items()
    ]
    result.add(**{"parts of a dispatch": parts, "memory": _memory()})
    driver.close()


def profile(result: Result, args: argparse.Namespace) -> None:
    """Measure where the time of a decode step goes on the device: operation by operation, for few and for
    many rows.
    """
    driver = _started(result, args)
    floor_ms = _floor_ms(args)
    result.add(**{"floor of a step, ms (weights at the copy's rate)": floor_ms or "not known"})
    summaries = []
    for rows in PROFILED_ROWS:
        group = Group(rows, (_PROMPT, _PROMPT), (_OUTPUT, _OUTPUT))
        waves = [jobs(Workload(f"profile {rows}", "", (group,), ()), i, _num_words(args)) for i in (0, 1, 2)]
        driver.run_wave(waves[0])
        step_ms = 1e3 / figures(waves[1], [driver.run_wave(waves[1])])["decode_tokens_per_s"]
        summaries.append(f"{rows} rows: {step_ms:.3g} ms a step")
        result.say("; ".join(summaries))
        driver.take_steps()
        run = driver.engine.profile(result.file.parent / "profiles", steps=1000)
        driver.run_wave(waves[2])
        run.stop()
        trace = run.result(60.0).trace
        steps = sum(each.num_steps for each in driver.take_steps() if each.decode_only)
        shutil.copy(trace, args.out / f"trace_{rows}_rows.json.gz")
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            events = of_decode_steps(device_events(json.load(file)["traceEvents"]))
        found = shares(events)
        busy_us = sum(each.us for each in found)
        if not found:
            raise SystemExit("RuntimeError: the trace has no operations of the device")
        summaries[-1] += f", of which operations take {busy_us / steps / 1e3:.3g} ms"
        title = f"{rows} rows, {steps} steps, {len(events)} calls of operations"
        result.add(**{f"{title}, by scope": _table(by_scope(found), steps, busy_us)})
        result.add(**{f"{title}, the longest": _table(found[:MOST_OPERATIONS], steps, busy_us)})
        result.say(f"{'; '.join(summaries)}; the floor is {floor_ms or 0:.3g} ms")
    result.add(memory=_memory())
    driver.close()


def _table(lines: Sequence[Share], steps: int, busy_us: float) -> list[dict[str, Any]]:
    return [
        {
            "operation": each.operation,
            "scope": each.scope or "none",
            "calls a step": each.calls / steps,
            "us a step": each.us / steps,
            "share": f"{each.us / busy_us:.1%}",
        }
        for each in lines
    ]


def memory(result: Result, args: argparse.Namespace) -> None:
    """Measure what the engine takes of the device's memory if nobody says how large the KV cache is."""
    # One decode step at a time: fewer programs are compiled to learn how much scratch memory they need.
    given = _options(args) | {"kv_cache_bytes": None, "max_decode_steps": 1}
    result.add(**{"before loading": _memory()})
    engine = Engine.from_pretrained(str(args.checkpoint), options.engine_config(given))
    cache = engine.config.kv_cache_bytes or 0
    result.add(pages=engine.info.num_pages, page_size=engine.info.page_size, **{"with KV cache": _memory()})
    result.say(f"weights of {_weight_bytes(args) / 1e9:.2f} GB and a KV cache of {cache / 1e9:.2f} GB")
    engine.shutdown()


def _floor_ms(args: argparse.Namespace) -> float | None:
    """Tell how long it takes to read the weights once, at the rate at which the device copies; None if that
    was not measured.
    """
    try:
        rate = float(json.loads(args.facts.read_text(encoding="utf-8"))[COPY])
    except (OSError, ValueError, KeyError):
        return None
    return 1e3 * _weight_bytes(args) / (rate * 1e9)


def _weight_bytes(args: argparse.Namespace) -> int:
    return sum(file.stat().st_size for file in args.checkpoint.glob("*.safetensors"))


def _num_words(args: argparse.Namespace) -> int:
    return min(NUM_WORDS, load_config(args.checkpoint).vocab_size)


def _memory() -> dict[str, str] | str:
    """Tell what the device says of its memory."""
    stats = jax.devices()[0].memory_stats()
    if not stats:
        return "the device says nothing of its memory"
    return {name: f"{value / 1e6:.0f} MB" for name, value in stats.items() if "bytes" in name}


if __name__ == "__main__":
    main()
