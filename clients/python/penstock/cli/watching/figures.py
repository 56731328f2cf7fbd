"""Writes numbers as short as a screen wants them."""

from __future__ import annotations

NONE = "-"
"""Stands for a number that there is not."""


def count(value: float | None) -> str:
    """Write a count or a rate in at most six characters: 0.4, 12, 9,999, 12.3k, 4.56M."""
    if value is None:
        return NONE
    if value and value < 9.95:
        return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"
    if value < 9_999.5:
        return f"{value:,.0f}"
    size, unit = next(
        ((size, unit) for size, unit in ((1e3, "k"), (1e6, "M")) if value < 999.5 * size), (1e9, "G")
    )
    return f"{_three(value / size)}{unit}"


def share(value: float | None) -> str:
    """Write a share of 0 to 1 in percent."""
    return NONE if value is None else f"{value * 100:.0f} %"


def seconds(value: float | None) -> str:
    """Write a latency: 0.42 ms, 62.5 ms, 1.5 s, 65 s, 1 h 07 m."""
    if value is None:
        return NONE
    if value < 0.9995:
        return f"{_three(value * 1e3)} ms"
    return f"{_three(value)} s" if value < 99.5 else age(value)


def age(value: float) -> str:
    """Write a time in whole units, the largest two: 12 s, 2 m 05 s, 1 h 07 m, 3 d 04 h."""
    whole = max(round(value), 0)
    for unit, parts, smaller in (("d", 86_400, "h"), ("h", 3_600, "m"), ("m", 60, "s")):
        if whole >= parts:
            below = {"h": 3_600, "m": 60, "s": 1}[smaller]
            return f"{whole // parts} {unit} {whole % parts // below:02d} {smaller}"
    return f"{whole} s"


def _three(value: float) -> str:
    """Write three digits, without a trailing zero behind the point."""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
