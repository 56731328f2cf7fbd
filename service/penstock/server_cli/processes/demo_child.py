"""A child process that ends with its parent and gets each of the parent's signals exactly once.

Python runs signal handlers in the main thread, between two instructions. A waiting system call, such as
waitpid, is interrupted only by a signal that comes to its own thread while it waits. A signal that comes just
before, or to another thread, is noticed when the call returns. Here that would be when the server has ended,
and the server waits for that very signal. So the parent waits for a pipe into which every signal is written
(signal.set_wakeup_fd), whenever and wherever it comes; SIGCHLD is one of these signals.
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
    """A running process, made by `child`."""

    def __init__(self, wakeups: int) -> None:
        self._wakeups = wakeups
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: deque[int] = deque()
        self.stopped = False
        """Whether a signal told us to stop; it was passed on to the child."""

    def _start(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        self._hand_on()  # signals that came while the child was being started

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.stopped = True
        self._waiting.append(number)
        self._hand_on()

    def _hand_on(self) -> None:
        """Pass on the signals that came. A handler may interrupt this and take the next one itself."""
        while self._process is not None and self._waiting:
            with suppress(IndexError):
                self._process.send_signal(self._waiting.popleft())

    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Ask the child to end."""
        if self._process is not None:
            self._process.terminate()

    def wait(self) -> int:
        """Wait until the child has ended and return its exit code, negative if a signal ended it."""
        assert self._process is not None, "it is started before anybody has it"
        while (code := self._process.poll()) is None:
            os.read(self._wakeups, 4096)  # returns once a signal has come, even before this call
        return code


@contextmanager
def child(command: list[str]) -> Iterator[Child]:
    """Run a command in a process group of its own and pass signals on to it. It never survives the block.

    Its output goes where ours goes. Must be used in the main thread, because Python handles signals there.
    """
    wakeups, written = os.pipe()
    os.set_blocking(written, False)
    made = Child(wakeups)
    wakeup_before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    before = {number: signal.signal(number, made._forward) for number in FORWARDED}
    # needed only so that it is written to the pipe
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
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
