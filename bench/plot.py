"""Draws throughput against concurrency as an SVG, from the records of bench.run and bench.rivals.

python -m bench.plot bench/out/*.jsonl --out bench/out/concurrency.svg
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench import svg
from bench.measures import record
from bench.workloads import CONCURRENCY, LEVELS

Series = Mapping[str, Mapping[int, float]]
"""For each engine, output tokens per second by number of concurrent requests."""


def series(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the medians of the repeats of the workloads C1, C2, ..."""
    levels = dict(zip(CONCURRENCY, LEVELS, strict=True))
    values: dict[str, dict[int, list[float]]] = {}
    for line in records:
        if line["workload"] in levels:
            of_engine = values.setdefault(line["engine"], {})
            of_engine.setdefault(levels[line["workload"]], []).append(line["figures"]["output_tokens_per_s"])
    return {name: {n: median(found[n]) for n in sorted(found)} for name, found in values.items()}


def round_up(value: float) -> float:
    """Return the least number of the form 1, 2 or 5 times a power of ten that is not below a positive
    value.
    """
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def drawing(found: Series) -> str:
    """Draw the picture, with concurrency on a logarithmic axis and tokens/s from zero. Raises ValueError
    without data.
    """
    if not found:
        raise ValueError("no concurrency workloads in these files; run with --workloads concurrency")
    step = round_up(max(max(line.values()) for line in found.values()) / 5)
    top = step * math.ceil(max(max(line.values()) for line in found.values()) / step - 1e-9)

    def at(level: int, value: float) -> tuple[float, float]:
        return svg.across(svg.log_share(level, LEVELS[0], LEVELS[-1])), svg.up(value / top)

    parts: list[str] = []
    for mark in range(round(top / step) + 1):
        parts += svg.y_mark(at(1, mark * step)[1], f"{mark * step:g}")
    parts += [svg.x_mark(at(level, 0)[0], str(level)) for level in LEVELS]
    parts += svg.titles("concurrent requests", "output tokens/s")
    for number, (name, line) in enumerate(found.items()):
        colour = svg.COLOURS[number % len(svg.COLOURS)]
        points = [at(level, value) for level, value in line.items()]
        parts.append(svg.polyline(points, colour))
        parts += [svg.dot(*point, colour) for point in points]
        parts += svg.legend(number, name, colour)
    return svg.picture(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON lines")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    args = parser.parse_args(arguments)
    found = series(line for file in args.files for line in record.read_lines(file))
    try:
        args.out.write_text(drawing(found), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"bench.plot: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
