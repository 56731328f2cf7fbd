"""How many threads XLA computes on. Each case has a process of its own, because a process has one pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.machine.processors import available_processors

HEAD = """
import logging, os
logging.basicConfig(format="%(levelname)s %(message)s")
import jax
from penstock.runtime.execution.cpu_threads import check_pool, pool_size, start_backends
"""
LOAD = """
from penstock.runtime.config import EngineConfig
from penstock.runtime.engine import Engine
config = EngineConfig({options}kv_cache_bytes=2**22, show_progress=False)
engine = Engine.from_pretrained("demo", config)
print(pool_size(), engine.config.threads)
"""

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted by Linux's /proc"),
]


def run(code: str, **environment: str) -> tuple[list[str], str]:
    """Return the words that the code prints, and its log."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def test_the_backend_starts_with_the_given_number_of_threads() -> None:
    """The environment variable that sets the number is restored afterwards, and a value that was there before
    does not count.
    """
    code = """
print(pool_size())
print(len(start_backends(3)))
print(pool_size(), os.environ.get("PJRT_NPROC"))
check_pool(3)
check_pool(2)
"""
    words, log = run(code, JAX_PLATFORMS="cpu")
    assert words == ["0", "1", "3", "None"]
    assert "has 3 threads, where the engine was to have 2" in log
    assert log.count("CPU pool") == 1
    words, log = run(code, JAX_PLATFORMS="cpu", PJRT_NPROC="5")
    assert words == ["0", "1", "3", "5"]


@pytest.mark.parametrize(("options", "wanted"), [("threads=3, ", 3), ("", available_processors())])
def test_an_engine_has_the_threads_of_its_options(options: str, wanted: int) -> None:
    words, log = run(LOAD.format(options=options))
    assert words == [str(wanted), str(wanted)]
    assert "CPU pool" not in log


def test_an_engine_that_comes_too_late_says_so() -> None:
    words, log = run("jax.devices()\n" + LOAD.format(options="threads=1, "), PJRT_NPROC="4")
    assert words == ["4", "1"]
    assert "has 4 threads, where the engine was to have 1" in log
