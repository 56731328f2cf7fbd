"""The parts of a picture as SVG, which `bench.plot` and `bench.kernels` draw by hand. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 30, 50
"""The margins around the axes. The legend is in the right one."""
COLOURS = (
    *("#1b6ca8", "#c8553d", "#2a9d5c", "#8e5ea2", "#b8860b"),
    *("#555555", "#17a2b8", "#d63384", "#7a5c3e", "#8fb339"),
)


def picture(parts: Iterable[str]) -> str:
    """Return the whole file."""
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def across(share: float) -> float:
    """Return the x of a share of the axis' length."""
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def up(share: float) -> float:
    """Return the y of a share of the axis' height, from below."""
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def log_share(value: float, low: float, high: float) -> float:
    """Tell where a value lies on a logarithmic axis from `low` to `high`: 0 to 1."""
    return math.log2(value / low) / math.log2(high / low)


def x_mark(x: float, text: str) -> str:
    """Draw a number below the axis."""
    return f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{text}</text>'


def y_mark(y: float, text: str) -> list[str]:
    """Draw a number beside the axis, and its line."""
    return [
        f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>',
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>',
    ]


def titles(x: str, y: str) -> list[str]:
    """Write what the axes mean."""
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [
        f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{x}</text>',
        f'<text x="{LEFT - 55}" y="{TOP - 12}">{y}</text>',
    ]


def polyline(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> str:
    """Draw a line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'


def dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def legend(number: int, name: str, colour: str) -> list[str]:
    """Draw the entry of that number, from 0."""
    at = TOP + 20 * number
    return [
        f'<rect x="{WIDTH - RIGHT + 15}" y="{at - 9}" width="12" height="4" fill="{colour}"/>',
        legend_text(number, name),
    ]


def legend_text(number: int, text: str) -> str:
    """Write what stands beside a sign of the legend."""
    return f'<text x="{WIDTH - RIGHT + 33}" y="{TOP + 20 * number}">{escape(text)}</text>'
