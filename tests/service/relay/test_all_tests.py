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
FOLDERS = ("access", "lifecycle", "limits", "listening", "replies", "requests", "rpcs", "watching", "weights")
"""The folders whose tests run, beside servicers."""
WITH_AN_ENGINE = ("servicers/test_real.py",)
"""Of the files of servicers that start an engine, those that ask in all ways."""
OF_THE_ENGINE = (
    "servicers/chats/test_demo_tools.py",
    "servicers/images/test_golden_images.py",
    "servicers/test_adapters_real.py",
    "servicers/test_cache_and_priority.py",
    "servicers/test_embedded_alike.py",
    "servicers/test_gguf.py",
    "servicers/test_goldens.py",
    "servicers/test_quantised.py",
    "servicers/test_speculation.py",
    "weights/test_across_an_update.py",
    "weights/test_fresh.py",
    "weights/test_keep.py",
    "weights/test_policies.py",
)
"""These take minutes to find out what the engine computes, and ask for it as the other files do."""


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


def drawn_as(config: pytest.Config) -> list[str]:
    """Return the options by which a run draws the same part as this one; none for all tests."""
    options = {name: config.getoption(name) for name in ("draw", "touched")}
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


@pytest.mark.ci
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("folders", [("servicers",), FOLDERS], ids=["servicers", "other folders"])
def test_the_service_through_a_front_process(folders: tuple[str, ...], pytestconfig: pytest.Config) -> None:
    """CI draws one in twenty-three of the tests of each file, and has all of a folder whose sources a commit
    touches; of all folders if it touches the relay.
    """
    others = " and ".join(f"not {name}" for name in INSIDE)
    left_out = [f"--ignore={TESTS / 'service' / file}" for file in (*OF_THE_ENGINE, *WITH_AN_ENGINE)]
    places = [str(TESTS / "service" / folder) for folder in folders]
    ends_well(*places, "-m", "not sweep", "-k", others, *left_out, *drawn_as(pytestconfig))


@pytest.mark.sweep
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("file", WITH_AN_ENGINE)
def test_an_engine_through_a_front_process(file: str) -> None:
    ends_well(str(TESTS / "service" / file), "-m", "not sweep")


def test_what_is_left_out_exists() -> None:
    assert all((TESTS / "service" / file).is_file() for file in (*OF_THE_ENGINE, *WITH_AN_ENGINE))


@pytest.mark.sweep
@pytest.mark.timeout(3000)
def test_the_table_of_calls_and_answers_through_a_front_process() -> None:
    """By the driver for Python, all groups."""
    ends_well(str(TESTS / "conformance" / "test_conformance.py"), "-k", "table and python")
