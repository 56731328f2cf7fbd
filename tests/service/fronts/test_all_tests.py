"""Tests of the other folders through a front process: what they say of a server is true there, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVICE = Path(__file__).parents[1]
INSIDE = (
    "test_nothing_stays_of_refused_calls",
    "test_refusals_that_nobody_takes_are_bounded",
)
"""These look into the gRPC server, which is in the front process then."""


@pytest.mark.sweep
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "folder",
    ["access", "lifecycle", "limits", "listening", "replies", "requests", "rpcs", "servicers", "watching"],
)
def test_through_a_front_process(folder: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not sweep"]
    chosen = [str(SERVICE / folder), "-k", " and ".join(f"not {name}" for name in INSIDE)]
    ended = subprocess.run(
        [*command, *chosen],
        env={**os.environ, "PENSTOCK_TEST_FRONT_PROCESSES": "1"},
        cwd=SERVICE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
