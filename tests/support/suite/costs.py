"""Counts what `make test` costs: engines that start, programs that are made, and processes.

Times differ between machines and hours; these counts do not. A run fails in which the tests that are neither
`ci` nor `sweep` exceed the budget, and names the files that cost most.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import pytest

from tests.front_processes import VARIABLE

BUDGET: Mapping[str, int] = {"engines": 24, "programs": 2850, "processes": 240}
"""Most that the tests of `make test` may cost together.

An engine that starts takes about 1 s of processor time beside its programs, a program 0.1 to 3 s, a process
that imports the server 2 s.
"""
_LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""What JAX tells before a program is compiled or read from disk, so that a count is the same with both."""
_IMPORTERS = ("penstock.runtime.execution.program_set", "penstock.runtime.execution.device_state")
"""The modules that call `compile_all`, once for each engine and for each encoder of images."""


class Costs:
    """A plugin of pytest that counts by file, in each worker of xdist, and adds up in the controller."""

    def __init__(self) -> None:
        self.by_file: dict[str, Counter[str]] = {}
        self._now: Counter[str] = Counter()
        sys.addaudithook(self._on_audit)

    def pytest_configure(self, config: pytest.Config) -> None:
        """There is no budget where more is counted than in `make test`: with --draw, because JAX forgets
        programs between files that are compiled in two ways; and with front processes.
        """
        self._has_budget = config.getoption("draw", None) is None and VARIABLE not in os.environ

    def _on_audit(self, event: str, arguments: Any) -> None:
        if event == "subprocess.Popen":
            self._now["processes"] += 1

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _LOWER:
            self._now["programs"] += 1

    def pytest_collection_finish(self) -> None:
        """By now the files of tests have imported JAX, if any of them needs it."""
        if "jax.monitoring" in sys.modules:
            sys.modules["jax.monitoring"].register_event_duration_secs_listener(self._on_duration)
        for name in _IMPORTERS:
            if module := sys.modules.get(name):
                mock.patch.object(module, "compile_all", self._counted(module.compile_all)).start()

    def _counted(self, compile_all: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            self._now["engines"] += 1
            return compile_all(*arguments, **options)

        return counted

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now.clear()
        result = yield
        if not any(item.get_closest_marker(name) for name in ("ci", "sweep")):
            self.by_file.setdefault(item.nodeid.split("::")[0], Counter()).update(self._now)
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Note that a worker of xdist has ended."""
        for file, counts in getattr(node, "workeroutput", {}).get("costs", {}).items():
            self.by_file.setdefault(file, Counter()).update(counts)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["costs"] = {file: dict(counts) for file, counts in self.by_file.items() if counts}
        elif self.excess() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = self.total()
        terminalreporter.write_line(
            "cost: " + ", ".join(f"{total[name]} of {most} {name}" for name, most in BUDGET.items())
        )
        for name in self.excess():
            terminalreporter.write_line(
                f"The tests of `make test` may cost {BUDGET[name]} {name}, and cost {total[name]}: let tests "
                "share an engine or a server, or mark those `ci` that cost most. By file:",
                red=True,
            )
            for file, counts in sorted(self.by_file.items(), key=lambda one: -one[1][name])[:15]:
                terminalreporter.write_line(f"  {counts[name]:5} {file}")

    def total(self) -> Counter[str]:
        return sum(self.by_file.values(), Counter())

    def excess(self) -> list[str]:
        """Return the names of what costs more than the budget allows."""
        total = self.total()
        return [name for name, most in BUDGET.items() if self._has_budget and total[name] > most]
