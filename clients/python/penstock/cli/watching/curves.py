"""Draws curves and bars of characters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "_.-=+*%#"


def curve(values: Sequence[float | None], *, most: float | None = None, ascii_only: bool = False) -> str:
    """Write one character for each value; a space where there is none. The highest is `most`, or the largest
    value.
    """
    levels = _ASCII_LEVELS if ascii_only else _LEVELS
    known = [value for value in values if value is not None]
    top = max(known, default=0.0) if most is None else most

    def level(value: float | None) -> str:
        if value is None:
            return " "
        if value <= 0 or top <= 0:
            return levels[0]
        return levels[min(int(value / top * (len(levels) - 1) + 0.5), len(levels) - 1)]

    return "".join(map(level, values))


def bar(parts: Sequence[tuple[float, str]], width: int, *, ascii_only: bool = False) -> Text:
    """Draw a bar of `width` characters whose parts, given as shares of it with their styles, follow each
    other. A part that is not empty has one character at least, as far as there is room.
    """
    full, rest = ("#", ".") if ascii_only else ("█", "░")
    text, left = Text(), width
    for share, style in parts:
        num = min(max(round(share * width), 1 if share > 0 else 0), left)
        text.append(full * num, style)
        left -= num
    return text.append(rest * left, "bright_black")
