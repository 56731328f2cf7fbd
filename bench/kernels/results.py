"""Results of lines: as records, and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from bench.kernels.lines import Line, Result, layer
from bench.kernels.turns import Timed
from bench.measures.cost import Machine, Work
from bench.measures.limits import Limits
from penstock.runtime.ops.native.library import Isa


def results(timed: Timed, limits: Limits) -> list[Result]:
    """Return a line by everybody who was measured. A rival is compared with the limits of the best
    instruction set. Raises ValueError if nothing is known of what the machine multiplies.
    """
    line, seconds = timed
    best = max(Isa)
    return [
        Result(line, by, taken, Machine(limits.peak(isa, line.multiplied(isa)), limits.bytes_per_s))
        for by, taken in seconds.items()
        for isa in [Isa.__members__.get(by, best)]
    ]


def record(result: Result) -> dict[str, Any]:
    """Write a result as a JSON object."""
    fields = asdict(result.line)
    work = fields.pop("work")
    return {**fields, "by": result.by, "seconds": result.seconds, **work, "limits": asdict(result.machine)}


def from_record(fields: Mapping[str, Any]) -> Result:
    """Read a result from a record, as the inverse of `record`. Other fields are ignored."""
    work = Work(fields["operations"], fields["bytes_read"])
    names = ("kind", "shape", "part", "format", "rows", "context")
    line = Line(**{name: fields[name] for name in names}, work=work)
    return Result(line, fields["by"], fields["seconds"], Machine(**fields["limits"]))


def latest(found: Iterable[Result]) -> list[Result]:
    """Return the last result of each line by each instruction set or rival, where records have several."""
    return list({(replace(result.line, work=Work(0, 0)), result.by): result for result in found}.values())


def with_layers(found: Sequence[Result]) -> list[Result]:
    """Return the results, and after the four products of a layer the layer."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in found:
        line = result.line
        if line.kind == "product":
            groups.setdefault((line.shape, line.format, line.rows, result.by), []).append(result)
    return [*found, *(layer(group) for group in groups.values() if len(group) == 4)]


_ORDER = {"product": 0, "decode": 1, "prefill": 2}
_PARTS = ("qkv", "o", "gate+up", "down", "layer", "attention")
HEAD = """\
| kernel | shape | format | rows | context | by | ms | GB/s | GFLOP/s | of the limit | binds |
|---|---|---|---:|---:|---|---:|---:|---:|---:|---|"""


def table(found: Iterable[Result]) -> str:
    """Write a table in Markdown, in the order of kernels and sizes."""

    def order(result: Result) -> tuple[Any, ...]:
        line = result.line
        return (
            _ORDER[line.kind], line.shape, line.format, _PARTS.index(line.part), line.context, line.rows,
        )  # fmt: skip

    return "\n".join([HEAD, *map(row, sorted(found, key=order))])


def row(result: Result) -> str:
    """Write a line of the table."""
    line, work = result.line, result.line.work
    name = line.part if line.kind == "product" else f"{line.kind} attention"
    return (
        f"| {name} | {line.shape} | {line.format} | {line.rows} | {line.context or ''} | {result.by} "
        f"| {_digits(result.seconds * 1e3)} | {_digits(work.bytes_read / result.seconds / 1e9)} "
        f"| {_digits(work.operations / result.seconds / 1e9)} | {result.share:.0%} | {result.binds} |"
    )


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
