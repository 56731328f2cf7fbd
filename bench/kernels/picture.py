"""Draws the roofline: operations per second against operations per byte, the machine's roofs, and what the
kernels reach below them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench import svg
from bench.kernels.lines import Result
from bench.measures.cost import Machine
from penstock.runtime.ops.native.library import Isa

_SIGNS = {"0.6B": "circle", "4B": "square", "8B": "triangle"}


def drawing(found: Sequence[Result]) -> str:
    """Draw the picture: layers of products filled, attention hollow. Raises ValueError without results."""
    shown = [result for result in found if result.line.part in ("layer", "attention")]
    if not shown:
        raise ValueError("no layers and no attention among these records")
    densities = [result.line.work.operations / result.line.work.bytes_read for result in shown]
    low = 2.0 ** math.floor(math.log2(min(densities)))
    high = max(2.0 ** math.ceil(math.log2(max(densities))), 2 * low)
    roofs = _roofs(shown)
    rivals = {_colour(result) for result in shown if result.by not in Isa.__members__}
    rates = [result.line.work.operations / result.seconds for result in shown]
    highest = max(*rates, *(machine.operations_per_s for machine in roofs.values()))
    top = 10.0 ** math.ceil(math.log10(highest))
    bottom = min(10.0 ** math.floor(math.log10(min(rates))), top / 10)

    def at(density: float, rate: float) -> tuple[float, float]:
        return svg.across(svg.log_share(density, low, high)), svg.up(svg.log_share(rate, bottom, top))

    parts: list[str] = []
    for power in range(round(math.log10(bottom)), round(math.log10(top)) + 1):
        parts += svg.y_mark(at(low, 10.0**power)[1], f"{10.0 ** (power - 9):g}")
    for power in range(round(math.log2(low)), round(math.log2(high)) + 1, 2):
        parts.append(svg.x_mark(at(2.0**power, bottom)[0], f"{2.0**power:g}"))
    parts += svg.titles("operations per byte", "GFLOP/s")
    colours = dict(zip(roofs, svg.COLOURS * len(roofs), strict=False))
    for number, (key, machine) in enumerate(roofs.items()):
        parts += svg.legend(number, key, colours[key])
        if key in rivals:  # it is below the roof of the best instruction set
            continue
        corners = [at(*point) for point in roof(machine, low, high, bottom)]
        parts.append(svg.polyline(corners, colours[key], dashed=True))
    for result, density, rate in zip(shown, densities, rates, strict=True):
        hollow = result.line.part == "attention"
        parts.append(_sign(_SIGNS[result.line.shape], *at(density, rate), colours[_colour(result)], hollow))
    for number, (name, kind) in enumerate(_SIGNS.items(), len(roofs) + 1):
        x, y = svg.WIDTH - svg.RIGHT + 21.0, svg.TOP + 20.0 * number - 5
        parts += [_sign(kind, x, y, "black", False), svg.legend_text(number, f"{name}: a layer")]
    number = len(roofs) + len(_SIGNS) + 1
    x, y = svg.WIDTH - svg.RIGHT + 21.0, svg.TOP + 20.0 * number - 5
    parts += [_sign("circle", x, y, "black", True), svg.legend_text(number, "attention")]
    return svg.picture(parts)


def roof(machine: Machine, low: float, high: float, bottom: float) -> list[tuple[float, float]]:
    """Return the corners of a machine's roof over densities from `low` to `high`, and above `bottom`
    operations per second.
    """
    ridge = machine.operations_per_s / machine.bytes_per_s
    start = max(low, bottom / machine.bytes_per_s)
    corners = [min(max(ridge, start), high)]
    return [
        (density, min(machine.operations_per_s, density * machine.bytes_per_s))
        for density in sorted({start, *corners, high})
    ]


def _colour(result: Result) -> str:
    """Name what has a colour: an instruction set with what it multiplies, or a rival."""
    isa = Isa.__members__.get(result.by)
    return f"{result.by} {result.line.multiplied(isa)}" if isa is not None else result.by


def _roofs(shown: Sequence[Result]) -> dict[str, Machine]:
    """Find the highest limits of each colour, of all the runs that the results are from."""
    found: dict[str, Machine] = {}
    for result in shown:
        known = found.setdefault(_colour(result), result.machine)
        found[_colour(result)] = Machine(
            max(known.operations_per_s, result.machine.operations_per_s),
            max(known.bytes_per_s, result.machine.bytes_per_s),
        )
    return found


def _sign(kind: str, x: float, y: float, colour: str, hollow: bool) -> str:
    look = f'fill="{"white" if hollow else colour}" stroke="{colour}"'
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" {look}/>'
    if kind == "square":
        return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {look}/>'
    return f'<path d="M{x:.1f} {y - 4:.1f}l4.5 8h-9z" {look}/>'
