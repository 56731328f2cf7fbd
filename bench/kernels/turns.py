"""Measures lines: the instruction sets (and rivals) take turns in every round, because the speed of such
machines drifts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from bench.kernels import attention
from bench.kernels.lines import SHAPES, Line, decode_line, prefill_line, product_line, products
from bench.kernels.products import Layers
from bench.kernels.rival import OneDNN
from bench.kernels.stacks import stack_bytes
from bench.measures import limits
from bench.measures.limits import Format
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.library import Isa

_LONG_S, _LEAST_ROUNDS = 5.0, 3


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be measured."""

    kinds: Sequence[str]
    shapes: Sequence[str]
    formats: Sequence[Format]
    rows: Sequence[int]
    decode_rows: Sequence[int]
    contexts: Sequence[int]
    """Of decode attention."""
    prefill_contexts: Sequence[int]
    rounds: int
    """A line whose rounds have taken some seconds has fewer, but at least three."""


Timed = tuple[Line, Mapping[str, float]]
"""A line, and the median seconds of one call by instruction set or rival."""


def sets() -> list[Isa]:
    """Return the instruction sets of this machine."""
    return [Isa(number) for number in range(Isa.AVX2, library.load().penstock_best_isa() + 1)]


def measure(wanted: Wanted, rival: OneDNN | None) -> Iterator[Timed | limits.Limits]:
    """Yield lines as they are measured, and before each the machine's limits at that time."""
    for shape, format in product(wanted.shapes, wanted.formats):
        yield from _products(shape, format, wanted, rival)
        yield from _attention(shape, format, wanted)


def _products(
    shape: str, format: Format, wanted: Wanted, rival: OneDNN | None
) -> Iterator[Timed | limits.Limits]:
    if "products" not in wanted.kinds:
        return
    rival = rival if format == "bfloat16" else None
    for each in products(SHAPES[shape]):
        layers = Layers(each, format, stack_bytes())
        if rival is not None:
            rival.prepare(each, stack_bytes())
        for rows in wanted.rows:
            line = product_line(shape, each, format, rows)
            operations = line.work.operations
            others = rival.runners(rows, operations) if rival is not None else {}
            ours = layers.runner(rows, operations)
            yield limits.measure()
            yield line, _in_turns(ours, others, wanted)


def _attention(shape: str, format: Format, wanted: Wanted) -> Iterator[Timed | limits.Limits]:
    lines: list[Line] = []
    if format not in ("bfloat16", "int8"):
        return
    if "decode" in wanted.kinds:
        lines += [
            decode_line(shape, format, rows, context)
            for context, rows in product(wanted.contexts, wanted.decode_rows)
        ]
    if "prefill" in wanted.kinds:
        lines += [prefill_line(shape, format, context) for context in wanted.prefill_contexts]
    for line in lines:
        ours = attention.runner(line, stack_bytes())
        yield limits.measure()
        yield line, _in_turns(ours, {}, wanted)


def _in_turns(
    ours: Callable[[], float], others: Mapping[str, Callable[[], float]], wanted: Wanted
) -> Mapping[str, float]:
    times: dict[str, list[float]] = {}
    began = time.perf_counter()
    for turn in range(wanted.rounds):
        if turn >= _LEAST_ROUNDS and time.perf_counter() - began > _LONG_S:
            break
        for isa in sets():
            library.limit_isa(isa)
            times.setdefault(isa.name, []).append(ours())
        for name, other in others.items():
            times.setdefault(name, []).append(other())
    library.limit_isa(Isa.AMX)
    return {name: median(taken) for name, taken in times.items()}
