"""Tells how many tests each tier has, which tests only the sweep has, and how often each of them comes up.

    python -m tests.support.suite.tiers [FILE OR FOLDER ...]

It collects the tests and runs none.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tests.support.suite.drawing import GOLDEN_NAMES, SWEEP_PARTS, sweep_key


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one case of a test is."""

    test: str
    """The case's node id."""
    tier: str
    """`test`, `ci` or `sweep`."""
    part: int
    """Of the parts of the sweep, the one that a case of the sweep is in."""


class _Collector:
    """A plugin of pytest that notes where each case is, and has none of them run."""

    def __init__(self) -> None:
        self.placed: list[Placed] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            tier = next((name for name in ("sweep", "ci") if item.get_closest_marker(name)), "test")
            self.placed.append(Placed(item.nodeid, tier, sweep_key(item).part(GOLDEN_NAMES)))
        items.clear()


def told(placed: Iterable[Placed], parts: int = SWEEP_PARTS) -> list[str]:
    """Return the lines that tell of these cases."""
    placed = list(placed)
    sizes = Counter(case.tier for case in placed)
    drawn = Counter(case.part for case in placed if case.tier == "sweep")
    tests: dict[str, list[Placed]] = {}
    for case in placed:
        tests.setdefault(case.test.split("[")[0], []).append(case)
    swept = {name: cases for name, cases in tests.items() if {case.tier for case in cases} == {"sweep"}}
    shares = ", ".join(str(drawn[part]) for part in range(parts))
    lines = [
        f"make test: {sizes['test']} cases; CI: {sizes['ci']} more; the sweep: {sizes['sweep']}",
        f"of the sweep a commit has one part of {parts} ({shares}), and all that it touches",
        f"the sweep alone has {len(swept)} tests; before each: its cases, and how many parts have some",
    ]
    for name, cases in swept.items():
        lines.append(f"{len(cases):6} {len({case.part for case in cases}):3}  {name}")
    return lines


def main(arguments: list[str]) -> int:
    collector = _Collector()
    status = pytest.main(["--collect-only", "-qq", *arguments], plugins=[collector])
    sys.stdout.write("\n".join([*told(collector.placed), ""]))
    # Nothing was left to run, which is no failure here.
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
