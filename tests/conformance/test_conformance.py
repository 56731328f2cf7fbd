"""Python, Go, Java and grpcurl are answered as the table says, and alike.

Every driver runs every group of cases with the group's server. What it prints is compared with the table, and
with what the driver for Python prints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.comparing import agrees_with_table, compact, normal
from tests.conformance.drivers import DRIVERS, PYTHON, Driver
from tests.conformance.servers import prepared, server_of
from tests.conformance.table import Group, for_run, for_table, groups

QUICK = "basics"
"""The group that CI always runs with Python. The rest is in the sweep, of which a run has all groups with one
of the other drivers at most, because each of those is built for a minute.
"""


class Rig:
    """A running server, and what each driver printed."""

    def __init__(self, group: Group, addr: str | None, folder: Path) -> None:
        self.group, self.addr, self.folder = group, addr, folder
        self._answers: dict[str, list[dict[str, Any]]] = {}

    def answers(self, driver: Driver) -> list[dict[str, Any]]:
        """Return what the driver printed, in the form that is compared. It is run at the first call."""
        if driver.name not in self._answers:
            driver.command()  # what is built for it is built before the group's held calls begin
            run = f"run-{driver.name}"
            calls = for_run([case.call() for case in self.group.cases], run)
            file, reflection = self.folder / f"{driver.name}.json", self.group.server.get("reflection", "")
            with self._server() as addr, prepared(self.group, addr, run):
                printed = driver.run(addr, calls, file, reflection)
            self._answers[driver.name] = list(map(normal, self.group.cases, for_table(printed, run)))
        return self._answers[driver.name]

    def _server(self) -> contextlib.AbstractContextManager[str]:
        """Return the group's server, or a new one where a run leaves the server in another state."""
        if self.addr is None:
            return server_of(self.group, self.folder)
        return contextlib.nullcontext(self.addr)


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    group: Group = request.param
    folder = tmp_path_factory.mktemp(group.name)
    if group.server.get("fresh"):
        yield Rig(group, None, folder)
        return
    with server_of(group, folder) as addr:
        yield Rig(group, addr, folder)


def every_group() -> list[Any]:
    """Each group with each driver. The drivers of a group follow one another, and share its server."""

    def mark_of(group: Group, driver: Driver) -> pytest.MarkDecorator:
        if driver.built:
            return pytest.mark.sweep(driver.built)
        return pytest.mark.ci if group.name == QUICK else pytest.mark.sweep

    return [
        pytest.param(group, driver, id=f"{group.name}-{driver.name}", marks=mark_of(group, driver))
        for group in groups()
        for driver in DRIVERS
    ]


@pytest.mark.parametrize(("rig", "driver"), every_group(), indirect=["rig"])
def test_answers_are_those_of_the_table_and_alike(rig: Rig, driver: Driver) -> None:
    """With Python the languages agree byte for byte, also on numbers that the table knows only nearly."""
    answers = rig.answers(driver)
    for case, answer in zip(rig.group.cases, answers, strict=True):
        agrees_with_table(case, answer)
    if driver != PYTHON:
        assert list(map(compact, answers)) == list(map(compact, rig.answers(PYTHON)))
