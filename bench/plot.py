"""Draws throughput against concurrency as an SVG, from the records of bench.run and bench.rivals.

python -m bench.plot bench/out/*.jsonl --out bench/out/concurrency.svg
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from bench.measures import record
from bench.workloads import CONCURRENCY, LEVELS

WIDTH, HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 30, 50
_COLOURS = ("#1b6ca8", "#c8553d", "#2a9d5c", "#8e5ea2", "#b8860b", "#555555")

Series = Mapping[str, Mapping[int, float]]
"""For each engine, output tokens per second by number of concurrent requests."""


def series(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Medians of the repeats of the workloads C1, C2, ..."""
    levels = dict(zip(CONCURRENCY, LEVELS, strict=True))
    values: dict[str, dict[int, list[float]]] = {}
    for line in records:
        if line["workload"] in levels:
            of_engine = values.setdefault(line["engine"], {})
            of_engine.setdefault(levels[line["workload"]], []).append(line["figures"]["output_tokens_per_s"])
    return {name: {n: median(found[n]) for n in sorted(found)} for name, found in values.items()}


def round_up(value: float) -> float:
    """The least number of the form 1, 2 or 5 times a power of ten that is not below a positive value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def svg(found: Series) -> str:
    """Draw the picture, with concurrency on a logarithmic axis and tokens/s from zero. Raises ValueError
    without data.
    """
    if not found:
        raise ValueError("no concurrency workloads in these files; run with --workloads concurrency")
    step = round_up(max(max(line.values()) for line in found.values()) / 5)
    top = step * math.ceil(max(max(line.values()) for line in found.values()) / step - 1e-9)

    def x(level: int) -> float:
        share = math.log2(level / LEVELS[0]) / math.log2(LEVELS[-1] / LEVELS[0])
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)

    box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for mark in range(round(top / step) + 1):
        at = y(mark * step)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{mark * step:g}</text>')
    parts += [
        f'<text x="{x(level):.1f}" y="{HEIGHT - _BOTTOM + 20}" text-anchor="middle">{level}</text>'
        for level in LEVELS
    ]
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">concurrent requests</text>')
    parts.append(f'<text x="{_LEFT - 55}" y="{_TOP - 12}">output tokens/s</text>')
    for number, (name, line) in enumerate(found.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [(x(level), y(value)) for level, value in line.items()]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
        at = _TOP + 20 * number
        parts.append(f'<rect x="{WIDTH - _RIGHT + 15}" y="{at - 9}" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - _RIGHT + 33}" y="{at}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON lines")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    args = parser.parse_args(arguments)
    found = series(line for file in args.files for line in record.read_lines(file))
    try:
        args.out.write_text(svg(found), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"bench.plot: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
