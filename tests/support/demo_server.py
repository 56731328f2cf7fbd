"""A server of the demo model in a process of its own, for tests that call it as any user would."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.support.models.toy import TEST_CACHE

ROOT = Path(__file__).parents[2]
START_S = 280.0


@contextlib.contextmanager
def served_demo(*flags: str) -> Iterator[str]:
    """Runs `penstock serve demo` with these flags. Gives its address."""
    command = ["serve", "demo", "--port", "0", "--grace", "0", "--compilation-cache", str(TEST_CACHE), *flags]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "penstock.cli", *command],
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
            if found := re.search(r"ready on (\S+)", line):
                break
        else:
            raise AssertionError(f"the demo server did not start:\n{''.join(said)}")
        slow.cancel()
        rest = threading.Thread(target=server.stdout.read, daemon=True)  # otherwise its pipe would fill
        rest.start()
        try:
            yield found[1]
        finally:
            server.terminate()
            server.wait(60)
            rest.join(60)
