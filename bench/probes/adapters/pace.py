"""Measures what LoRA adapters cost decode steps, on W2.

    python -m bench.probes.adapters.pace --checkpoint bench/out/model

Rows without an adapter, rows that all have the same one and rows of which each has another take turns on one
engine. The adapters are of random values and change all linear layers. The table has the medians of the
turns: the time of a decode step while all rows decode, the processor time of the process for such a step (on
a busy machine it changes less than the time does), and the tokens per second of the whole wave with its
prefill. What places for adapters cost alone, `bench.compare --set-here max_adapters=16` says.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

from bench.drivers import options
from bench.drivers.inprocess import Collector, InProcess
from bench.drivers.session import NUM_WORDS
from bench.probes.adapters.made import Maker
from bench.probes.features import step_ms
from bench.workloads import TABLE, Job, jobs, shrunk
from penstock.runtime.adapters.interface import AdapterTensors
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling

NONE, ONE, EACH = "no adapter", "one for all rows", "another one for each row"
WAYS: Mapping[str, Callable[[int], str | None]] = {
    NONE: lambda row: None,
    ONE: lambda row: name_of(0),
    EACH: lambda row: name_of(row),
}
"""Which adapter a row has."""
FIGURES = ("decode step, ms", "processor time of a step, ms", "output, tok/s")
_WORKLOAD = "W2"
_BEGUN = 2
"""Tokens that each row has when all of them decode."""


def name_of(number: int) -> str:
    """Return the name of an adapter."""
    return f"adapter {number}"


def turn(driver: InProcess, wave: tuple[Job, ...], way: str, number: int) -> dict[str, float]:
    """Run the wave once, and return FIGURES. Raises ValueError if a request failed."""
    requests = [
        Request(
            f"{way} {number} {row}",
            job.token_ids,
            ResolvedSampling(temperature=0.0),
            StoppingParams(max_tokens=job.max_tokens, ignore_eos=True),
            adapter=WAYS[way](row),
        )
        for row, job in enumerate(wave)
    ]
    ids = [request.request_id for request in requests]
    sink = Collector(ids)
    driver.take_steps()
    began_s = time.perf_counter()
    for request in requests:
        driver.engine.submit(request, sink)
    sink.wait_for_tokens(ids, _BEGUN)
    of_processors_s = time.process_time()
    left = wave[0].max_tokens - min(sum(count for _, count in sink.arrivals[i]) for i in ids)
    sink.wait_for_end()
    of_processors_s, took_s = time.process_time() - of_processors_s, time.perf_counter() - began_s
    if sink.errors:
        raise ValueError(next(iter(sink.errors.values())))
    steps_ms = step_ms(driver.take_steps(), len(wave))
    if left < 1 or not steps_ms:
        raise ValueError("outputs are too short: there is no step in which all rows decode")
    values = median(steps_ms), 1e3 * of_processors_s / left, sum(job.max_tokens for job in wave) / took_s
    return dict(zip(FIGURES, values, strict=True))


def table(found: Mapping[str, list[dict[str, float]]]) -> str:
    """Write the medians of each way, and of the ratios to the turns without an adapter. A ratio below 1 is
    slower.
    """
    lines = [
        f"| rows have | {' | '.join(f'{figure} | of none' for figure in FIGURES)} |",
        "|---|" + "---:|" * (2 * len(FIGURES)),
    ]
    for way, turns in found.items():
        cells = []
        for figure in FIGURES:
            pairs = [(one[figure], none[figure]) for one, none in zip(turns, found[NONE], strict=True)]
            ratios = [one / none if figure.endswith("/s") else none / one for one, none in pairs]
            cells += [f"{median(one for one, _ in pairs):.2f}", f"{median(ratios):.3f}"]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes.adapters.pace", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="see bench.checkpoint")
    parser.add_argument("--rank", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="after one warm-up; %(default)s")
    parser.add_argument(
        "--shrink", type=int, default=1, metavar="N", help="divide W2's lengths; default: %(default)s"
    )
    parser.add_argument(
        "--num-words", type=int, default=NUM_WORDS, metavar="N", help="prompts use ids below this"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine option")
    args = parser.parse_args()
    workload = shrunk(TABLE[_WORKLOAD], args.shrink) if args.shrink > 1 else TABLE[_WORKLOAD]
    num_rows = workload.groups[0].count
    given = {"max_adapters": num_rows, "max_adapter_rank": max(16, args.rank), **options.parse(args.set)}
    driver = InProcess(args.checkpoint, options.engine_config({**options.DEFAULTS, **given}))
    try:
        maker = Maker.of(Path(args.checkpoint), args.rank)
        for number in range(num_rows):
            sent = AdapterTensors(maker.config, maker.tensors(number).items())
            driver.engine.adapters.load(name_of(number), sent)
        found: dict[str, list[dict[str, float]]] = {}
        for number in range(-1, args.rounds):
            for way in WAYS if number % 2 else reversed(tuple(WAYS)):
                seed = number * len(WAYS) + list(WAYS).index(way)  # no prompt is in the prefix cache
                wave = jobs(workload, seed, args.num_words)
                figures = turn(driver, wave, way, number)
                if number >= 0:
                    found.setdefault(way, []).append(figures)
                    print(way, {name: round(value, 2) for name, value in figures.items()}, flush=True)
        print(f"\n{table({way: found[way] for way in WAYS})}")
        print(f"\ncompiles after warm-up: {driver.engine.compiles_after_warmup}")
    finally:
        driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
