"""A child process that ends with its parent and is handed the parent's signals, each of them once.

Python runs a handler of a signal in the main thread, between two instructions. A system call that waits, such
as waitpid, is cut short only by a signal that comes to this very thread while it waits. One that comes just
before, or to another thread, is noticed when the call returns; here that would be when the server has ended,
which waits for that very signal. So the waiting here is for a pipe into which every signal is written
(signal.set_wakeup_fd), whenever and wherever it comes; SIGCHLD is one of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Child:
    """A running process; made by `child`."""

    def __init__(self, wakeups: int) -> None:
        self._wakeups = wakeups
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: deque[int] = deque()
        self.stopped = False
        """Whether a signal told us to stop; it was handed on."""

    def _start(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        self._hand_on()  # what came while it was being started

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.stopped = True
        self._waiting.append(number)
        self._hand_on()

    def _hand_on(self) -> None:
        """Send what came. A handler may run in the midst of it and take what it was about to take."""
        while self._process is not None and self._waiting:
            with suppress(IndexError):
                self._process.send_signal(self._waiting.popleft())

    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Ask it to end."""
        if self._process is not None:
            self._process.terminate()

    def wait(self) -> int:
        """Its exit code once it has ended, negative when a signal ended it."""
        assert self._process is not None, "it is started before anybody has it"
        while (code := self._process.poll()) is None:
            os.read(self._wakeups, 4096)  # returns once a signal came, also one that came before this call
        return code


@contextmanager
def child(command: list[str]) -> Iterator[Child]:
    """Run a command in a process group of its own and hand signals on to it. It never outlives the block.

    Its output goes where ours goes. To be used in the main thread, as all of Python's signals are.
    """
    wakeups, written = os.pipe()
    os.set_blocking(written, False)
    made = Child(wakeups)
    wakeup_before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    before = {number: signal.signal(number, made._forward) for number in FORWARDED}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only to be written
    try:
        made._start(command)
        yield made
    finally:
        if made.runs():
            made.stop()
            made.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        os.close(wakeups)
        os.close(written)
