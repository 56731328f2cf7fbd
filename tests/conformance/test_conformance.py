"""Python, Go, Java and grpcurl are answered as the table says, and alike.

Every driver runs every group of cases with the group's server. What it prints is compared with the table, and
with what the driver for Python prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.comparing import agrees_with_table, compact, normal
from tests.conformance.drivers import DRIVERS, PYTHON, Driver
from tests.conformance.servers import prepared, server_of
from tests.conformance.table import Group, for_run, for_table, groups

QUICK = "basics"
"""The group that `make test` runs too, by the driver for Python."""


class Rig:
    """A running server, and what each driver printed."""

    def __init__(self, group: Group, addr: str, folder: Path) -> None:
        self.group, self.addr, self.folder = group, addr, folder
        self._answers: dict[str, list[dict[str, Any]]] = {}

    def answers(self, driver: Driver) -> list[dict[str, Any]]:
        """What the driver printed, in the form that is compared. It is run at the first call."""
        if driver.name not in self._answers:
            run = f"run-{driver.name}"
            calls = for_run([case.call() for case in self.group.cases], run)
            with prepared(self.group, self.addr, run):
                printed = driver.run(self.addr, calls, self.folder / f"{driver.name}.json")
            self._answers[driver.name] = list(map(normal, self.group.cases, for_table(printed, run)))
        return self._answers[driver.name]


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    group: Group = request.param
    with server_of(group) as addr:
        yield Rig(group, addr, tmp_path_factory.mktemp(group.name))


def every_group(*drivers: Driver) -> list[Any]:
    return [
        pytest.param(
            group,
            driver,
            id=f"{group.name}-{driver.name}",
            marks=[] if (group.name, driver) == (QUICK, PYTHON) else [pytest.mark.sweep],
        )
        for group in groups()
        for driver in drivers
    ]


@pytest.mark.parametrize(("rig", "driver"), every_group(*DRIVERS), indirect=["rig"])
def test_answers_are_those_of_the_table(rig: Rig, driver: Driver) -> None:
    for case, answer in zip(rig.group.cases, rig.answers(driver), strict=True):
        agrees_with_table(case, answer)


@pytest.mark.parametrize(
    ("rig", "driver"), every_group(*(d for d in DRIVERS if d != PYTHON)), indirect=["rig"]
)
def test_languages_agree_byte_for_byte(rig: Rig, driver: Driver) -> None:
    """Also on the numbers that the table knows only nearly."""
    assert list(map(compact, rig.answers(driver))) == list(map(compact, rig.answers(PYTHON)))
