"""Computes the least time that each workload can take on this machine, and how near a measured run comes.

    python -m bench.roofline --checkpoint DIR --results bench/out/penstock.jsonl

Memory is read by one thread per core. The peak of bf16 products is that of the processor's fastest
instruction for them, out of registers (bench/measures/limits.c), or what XLA reaches where there are no
native kernels or no C compiler; both are printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from bench.measures import limits, record
from bench.measures.cost import Machine, Work, decode_spans, one_pass, prefill_spans
from bench.workloads import MAIN, TABLE, Workload, waves
from penstock.runtime.config import KV_CACHE_DTYPES
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.models.config import ModelConfig


def xla_operations_per_s(
    tokens: int = 512, outputs: int = 3072, inputs: int = 1024, layers: int = 28
) -> float:
    """Measure the operations per second that XLA reaches on the products of a prefill step of a 0.6B model:
    bf16, weights [out, in], float32 sums.
    """
    weights = [jnp.full((outputs, inputs), 0.01, jnp.bfloat16) for _ in range(layers)]
    x = jnp.full((tokens, inputs), 0.01, jnp.bfloat16)

    @jax.jit
    def products(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        return [jnp.einsum("ti,oi->to", x, w, preferred_element_type=jnp.float32) for w in weights]

    seconds = limits.in_threads(lambda _: jax.block_until_ready(products(x, weights)), 1)
    return 2.0 * tokens * outputs * inputs * layers / seconds


def floors(
    config: ModelConfig,
    workload: Workload,
    machine: Machine,
    *,
    weight_bytes: float = 2,
    kv_is_int8: bool = False,
) -> dict[str, tuple[Work, float]]:
    """Return the work and the least seconds of each part of a workload, by the name of the figure that it is
    compared with. The sizes are those of `one_pass`.
    """
    found: dict[str, tuple[Work, float]] = {}
    known: list[tuple[int, ...]] = []
    work_of = partial(one_pass, config, weight_bytes=weight_bytes, kv_is_int8=kv_is_int8)
    planned = waves(workload, 0, config.vocab_size)
    for number, jobs in enumerate(planned, 1):
        passes = [work_of(prefill_spans(jobs, known))]
        passes += [work_of(spans) for spans in decode_spans(jobs)]
        seconds = [machine.seconds(work) for work in passes]
        known += [job.token_ids for job in jobs]
        if len(jobs) == 1:
            found["ttft_s"] = (passes[0], seconds[0])
            found["decode_s"] = (sum(passes[1:], Work(0, 0)), sum(seconds[1:]))
        else:
            name = f"wave{number}_s" if len(planned) > 1 else "wall_s"
            found[name] = (sum(passes, Work(0, 0)), sum(seconds))
    return found


def measured(records: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """Return the median of every figure, by (engine, workload)."""
    grouped: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for line in records:
        grouped.setdefault((line["engine"], line["workload"]), []).append(line["figures"])
    return {
        key: {name: median(repeat[name] for repeat in repeats) for name in repeats[0]}
        for key, repeats in grouped.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.roofline", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--results", type=Path, nargs="*", default=[], metavar="FILE", help="records of bench.run"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--weight-bytes", type=float, default=2, metavar="N", help="1 for int8; default: 2")
    parser.add_argument(
        "--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="the engine's option; default: auto"
    )
    parser.add_argument("--bytes-per-s", type=float, metavar="N", help="instead of measuring it")
    parser.add_argument("--operations-per-s", type=float, metavar="N", help="instead of measuring it")
    args = parser.parse_args()
    machine = _machine(args)
    results = measured(line for file in args.results for line in record.read_lines(file))
    engines = list(dict.fromkeys(engine for engine, _ in results))
    config = load_config(args.checkpoint)
    find = partial(floors, weight_bytes=args.weight_bytes, kv_is_int8=args.kv_cache_dtype == "int8")
    print("| workload | part | Gop | GB | least s |" + "".join(f" {e}, s | share |" for e in engines))
    print("|---|---|---:|---:|---:|" + "---:|---:|" * len(engines))
    for name in MAIN:
        if any(group.after_tokens for group in TABLE[name].groups):
            continue  # these workloads are about latency, not about work
        for figure, (work, least) in find(config, TABLE[name], machine).items():
            if not least:
                continue
            row = f"| {name} | {figure} | {work.operations / 1e9:.0f} | {work.bytes_read / 1e9:.1f} |"
            row += f" {least:.3f} |"
            for engine in engines:
                value = results.get((engine, name), {}).get(figure)
                row += f" {value:.3f} | {least / value:.0%} |" if value else " | |"
            print(row)
    return 0


def _machine(args: argparse.Namespace) -> Machine:
    read = args.bytes_per_s or limits.read_bytes_per_s(args.threads)
    found = {} if args.operations_per_s else limits.operations_per_s(args.threads)
    # Every format is compared with the peak of bf16, as int8 weights are not multiplied in int8 everywhere.
    peaks = {peak: rate for peak, rate in found.items() if peak.format == "bfloat16"}
    xla = xla_operations_per_s()
    print(f"memory: {read / 1e9:.1f} GB/s read by {args.threads} threads")
    for peak, rate in peaks.items():
        print(f"bf16 products: {rate / 1e12:.2f} Top/s ({peak.instruction})")
    print(f"bf16 products: XLA reaches {xla / 1e12:.2f} Top/s\n")
    return Machine(args.operations_per_s or max(peaks.values(), default=xla), read)


if __name__ == "__main__":
    sys.exit(main())
