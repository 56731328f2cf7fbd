"""Draws the rewards of a run as an SVG: python -m examples.reinforce.plot rewards.csv rewards.svg"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 40, 50
SAMPLED, HELD_OUT = "#1b6ca8", "#c8553d"

Points = Sequence[tuple[int, float]]
"""(step, value from 0 to 1)"""


def read(path: Path) -> tuple[Points, Points]:
    """(rewards of the steps' samples, rewards on the held-out questions)."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))

    def column(name: str) -> Points:
        return [(int(line["step"]), float(line[name])) for line in lines if line[name]]

    return column("reward"), column("held_out")


def svg(rewards: Points, held_out: Points) -> str:
    """Draw the picture. ValueError without data."""
    if not rewards or not held_out:
        raise ValueError("the file has no steps")
    last = max(step for step, _ in [*rewards, *held_out])

    def x(step: int) -> float:
        return LEFT + step / last * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM)

    def line(points: Points, colour: str, name: str, name_x: int) -> list[str]:
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        return [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<rect x="{name_x}" y="14" width="14" height="4" fill="{colour}"/>',
            f'<text x="{name_x + 22}" y="20">{name}</text>',
        ]

    box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10 * tenth} %</text>')
    parts += [
        f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{step}</text>'
        for step in range(0, last + 1, max(1, last // 6))
    ]
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    parts += line(rewards, SAMPLED, "samples of the step's questions", LEFT)
    parts += line(held_out, HELD_OUT, "samples of the held-out questions", LEFT + 260)
    parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="4" fill="{HELD_OUT}"/>' for a, b in held_out]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the rewards of a run.")
    parser.add_argument("rewards", type=Path, help="the CSV file of the run")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    asked = parser.parse_args()
    asked.picture.write_text(svg(*read(asked.rewards)), encoding="utf-8")


if __name__ == "__main__":
    main()
