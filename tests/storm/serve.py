"""`penstock`, which also counts its tasks when it is told to: `python -m tests.storm.serve FILE serve ...`.

On SIGUSR2 it writes to FILE how many tasks its event loop has, without those in which grpc waits for calls.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from penstock.cli.__main__ import main


def count(path: Path) -> None:
    """Count the tasks. Runs between two steps of the main thread, which is the event loop's."""
    tasks = [task for task in asyncio.all_tasks() if "_request_registered_call" not in repr(task)]
    path.write_text(str(len(tasks)))


if __name__ == "__main__":
    told = Path(sys.argv[1])
    signal.signal(signal.SIGUSR2, lambda number, frame: count(told))
    sys.exit(main(sys.argv[2:]))
