"""How long a thread may keep Python's interpreter while another one wants it. No jax.

The engine's thread and the one that writes to clients share one interpreter. Whoever wants it asks the other
to let go only after the switch interval. CPython's default is 5 ms, longer than all that the host does in a
step. It is one for the whole process, and so is the list of those who have set it.
"""

from __future__ import annotations

import sys
import threading
from typing import ClassVar


class SwitchInterval:
    """Sets the process's interval. Of several, the last that goes puts back what was before the first; until
    then it is that of the latest. Nothing is changed once somebody else has set it.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _users: ClassVar[list[SwitchInterval]] = []
    """Those that have set it and not gone, the latest last."""
    _before: ClassVar[float] = 0.0
    """What it was before the first of them."""

    def __init__(self, seconds: float | None) -> None:
        """None: leaves it alone."""
        self._seconds = seconds
        self._set = 0.0

    def apply(self) -> None:
        """Does nothing a second time."""
        with self._lock:
            if self._seconds is None or self in self._users:
                return
            if not self._users:
                SwitchInterval._before = sys.getswitchinterval()
            self._users.append(self)
            sys.setswitchinterval(self._seconds)
            self._set = sys.getswitchinterval()  # in whole microseconds

    def restore(self) -> None:
        """Does nothing before `apply`, nor a second time."""
        with self._lock:
            if self not in self._users:
                return
            is_ours = sys.getswitchinterval() == self._users[-1]._set
            self._users.remove(self)
            if is_ours:
                last = self._users[-1]._seconds if self._users else None
                sys.setswitchinterval(self._before if last is None else last)
