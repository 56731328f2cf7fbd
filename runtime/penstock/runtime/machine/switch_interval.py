"""How long a thread may keep Python's interpreter while another thread wants it. No jax.

The engine's thread and the one that writes to clients share one interpreter. A thread that wants it asks the
other one to let go only after the switch interval. CPython's default is 5 ms, longer than everything that the
host does in a step. There is one interval for the whole process, and so one list of the objects that have set
it.
"""

from __future__ import annotations

import sys
import threading
from typing import ClassVar


class SwitchInterval:
    """Sets the process's switch interval. If several objects set it, the latest counts, and the last one to
    be restored puts back the interval from before the first. Nothing is changed any more once other code has
    set it.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _users: ClassVar[list[SwitchInterval]] = []
    """The objects that have set the interval and are not restored, the latest last."""
    _before: ClassVar[float] = 0.0
    """The interval before the first of them."""

    def __init__(self, seconds: float | None) -> None:
        """`seconds`: the interval; None leaves it as it is."""
        self._seconds = seconds
        self._set = 0.0

    def apply(self) -> None:
        """Set the interval; do nothing a second time."""
        with self._lock:
            if self._seconds is None or self in self._users:
                return
            if not self._users:
                SwitchInterval._before = sys.getswitchinterval()
            self._users.append(self)
            sys.setswitchinterval(self._seconds)
            self._set = sys.getswitchinterval()  # CPython rounds it to microseconds

    def restore(self) -> None:
        """Put back the interval; do nothing before `apply`, or a second time."""
        with self._lock:
            if self not in self._users:
                return
            is_ours = sys.getswitchinterval() == self._users[-1]._set
            self._users.remove(self)
            if is_ours:
                last = self._users[-1]._seconds if self._users else None
                sys.setswitchinterval(self._before if last is None else last)
