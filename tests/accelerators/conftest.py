"""`--part NUMBER` runs a few of the cases, in minutes, for whoever changes kernels or programs."""

from __future__ import annotations

import pytest

CASES = 6
"""Of a part: a case takes 20 to 60 seconds of a processor, and CI has four minutes for all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        type=int,
        metavar="NUMBER",
        help=f"of the programs that are compiled, try those of the {CASES} cases that this number draws "
        "(default: all)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what the number draws. Numbers that follow each other have other cases, until all had their
    turn.
    """
    number = config.getoption("part")
    if number is None:
        return
    cases = [item for item in items if item.get_closest_marker("sweep")]
    parts = max(1, -(-len(cases) // CASES))
    left_out = {item for i, item in enumerate(cases) if i % parts != number % parts}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
