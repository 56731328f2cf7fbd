"""A server in a process of its own, for tests that call it as any user would."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.front_processes import FLAGS
from tests.support.models.compilation_cache import TEST_CACHE

ROOT = Path(__file__).parents[2]
START_S = 280.0


@contextlib.contextmanager
def served_demo(*flags: str) -> Iterator[str]:
    """Run `penstock serve demo` with these flags. Gives its address."""
    with served("demo", *flags) as address:
        yield address


@contextlib.contextmanager
def served(model: str, *flags: str) -> Iterator[str]:
    """Run `penstock serve` with this model and these flags. Gives its address."""
    command = ["penstock.cli", "serve", model, "--compilation-cache", str(TEST_CACHE)]
    with running(*command, "--port", "0", "--grace", "0", *FLAGS, *flags) as (_, address):
        yield address


@contextlib.contextmanager
def running(
    module: str, *arguments: str, until: str = "ready on"
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `python -m MODULE ARGUMENTS`. Gives the process and the address that it prints after `until`."""
    with subprocess.Popen(
        [sys.executable, "-u", "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    ) as server:
        assert server.stdout is not None
        slow = threading.Timer(START_S, server.kill)
        slow.start()
        said: list[str] = []
        for line in server.stdout:
            said.append(line)
            if found := re.search(rf"{until} (\S+)", line):
                break
        else:
            raise AssertionError(f"the server did not start:\n{''.join(said)}")
        slow.cancel()
        rest = threading.Thread(target=server.stdout.read, daemon=True)  # otherwise its pipe would fill
        rest.start()
        try:
            yield server, found[1]
        finally:
            server.terminate()
            server.wait(60)
            rest.join(60)
