"""Engines of the tests in these folders share programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def programs() -> Iterator[None]:
    """Engines that are alike compile once in a process; see `shared_programs`. A file that has imported no
    engine needs none, and must not wait for JAX.
    """
    if "penstock.runtime.execution.program_set" not in sys.modules:
        yield
        return
    from tests.support.suite.programs import shared_programs  # noqa: PLC0415 # it imports JAX

    with shared_programs():
        yield
