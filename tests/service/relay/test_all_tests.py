"""Tests of the other folders through a front process: what they say of a server is true there, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.front_processes import VARIABLE

TESTS = Path(__file__).parents[2]
INSIDE = (
    "test_nothing_stays_of_refused_calls",
    "test_refusals_that_nobody_takes_are_bounded",
)
"""These look into the gRPC server, which is in the front process then."""
OF_THE_ENGINE = (
    "servicers/chats/test_demo_tools.py",
    "servicers/images/test_golden_images.py",
    "servicers/test_cache_and_priority.py",
    "servicers/test_embedded_alike.py",
    "servicers/test_gguf.py",
    "servicers/test_goldens.py",
    "servicers/test_quantised.py",
    "weights/test_across_an_update.py",
    "weights/test_fresh.py",
    "weights/test_keep.py",
    "weights/test_policies.py",
)
"""These take minutes to find out what the engine computes, and ask for it as the other files do, of which
servicers/test_real.py has an engine, too.
"""


def ends_well(*arguments: str) -> None:
    """Run pytest with front processes, which must find no failure."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        env={**os.environ, VARIABLE: "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-5000:]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("folder", "which"),
    [
        pytest.param("rpcs", "not sweep", id="rpcs", marks=pytest.mark.ci),
        pytest.param("servicers", "not (ci or sweep)", id="servicers", marks=pytest.mark.ci),
        pytest.param("servicers", "ci and not sweep", id="servicers of engines", marks=pytest.mark.sweep),
        *(
            pytest.param(folder, "not sweep", id=folder, marks=pytest.mark.sweep)
            for folder in (
                "access",
                "lifecycle",
                "limits",
                "listening",
                "replies",
                "requests",
                "watching",
                "weights",
            )
        ),
    ],
)
def test_the_service_through_a_front_process(folder: str, which: str) -> None:
    others = " and ".join(f"not {name}" for name in INSIDE)
    left_out = [f"--ignore={TESTS / 'service' / file}" for file in OF_THE_ENGINE]
    ends_well(str(TESTS / "service" / folder), "-m", which, "-k", others, *left_out)


def test_what_is_left_out_exists() -> None:
    assert all((TESTS / "service" / file).is_file() for file in OF_THE_ENGINE)


@pytest.mark.sweep
@pytest.mark.timeout(3000)
def test_the_table_of_calls_and_answers_through_a_front_process() -> None:
    """By the driver for Python, all groups."""
    ends_well(str(TESTS / "conformance" / "test_conformance.py"), "-k", "table and python")
