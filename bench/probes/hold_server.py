"""`penstock serve` with a watch on its event loop, for `bench.loop_hold`.

It is run as a file, so that PYTHONPATH may choose the server of another commit. It answers each line on stdin
with one on stdout: the longest times in ms since the line before, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

from penstock.cli.__main__ import main
from penstock.service.server import PenstockServer

_EVERY_S = 0.001


class Watch:
    """Measures the longest waits for the event loop, and for the engine when it is asked for its load."""

    def __init__(self) -> None:
        self.loop_s = self.busy_s = self.load_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def watch_loop(self) -> None:
        """Measure how late the loop wakes up. `busy_s` leaves out time in which this process had no
        processor, because that is the machine's doing.
        """
        last, worked = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(_EVERY_S)
            late, busy = time.perf_counter() - last - _EVERY_S, time.process_time() - worked
            self.loop_s = max(self.loop_s, late)
            self.busy_s = max(self.busy_s, min(late, busy))
            last, worked = time.perf_counter(), time.process_time()

    def watch_engine(self, engine: Any) -> None:
        """Measure, on a thread of its own, how long the engine's lock and the interpreter are unavailable."""
        while True:
            time.sleep(5 * _EVERY_S)
            before = time.perf_counter()
            engine.load()
            self.load_s = max(self.load_s, time.perf_counter() - before)

    def answer(self) -> None:
        for _ in sys.stdin:
            found = {"loop_ms": self.loop_s, "busy_ms": self.busy_s, "load_ms": self.load_s}
            self.loop_s = self.busy_s = self.load_s = 0.0
            told = {name: seconds * 1e3 for name, seconds in found.items()}
            print(json.dumps(told), flush=True)

    def start(self, engine: Any) -> None:
        self._task = asyncio.get_running_loop().create_task(self.watch_loop())
        for target, arguments in ((self.watch_engine, (engine,)), (self.answer, ())):
            threading.Thread(target=target, args=arguments, daemon=True).start()


def watched() -> None:
    """Watch every server of this process from the moment its engine has started."""
    start_engine = PenstockServer.start_engine

    async def start(server: PenstockServer) -> None:
        await start_engine(server)
        assert server.serving is not None, "its engine has started"
        Watch().start(server.serving.engine)

    PenstockServer.start_engine = start  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    watched()
    sys.exit(main(sys.argv[1:]))
