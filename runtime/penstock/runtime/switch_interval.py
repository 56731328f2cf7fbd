"""How long a thread may keep Python's interpreter while another one wants it. No jax.

The engine's thread and the one that writes to clients share one interpreter. Whoever wants it asks the other
to let go only after the switch interval. CPython's default is 5 ms, longer than all that the host does in a
step. It is one for the whole process.
"""

from __future__ import annotations

import sys


class SwitchInterval:
    """Sets the process's interval, and puts it back unless somebody else has set it since."""

    def __init__(self, seconds: float | None) -> None:
        """None: leaves it alone."""
        self._seconds = seconds
        self._set: float | None = None
        self._before: float | None = None

    def apply(self) -> None:
        if self._seconds is not None and self._before is None:
            self._before = sys.getswitchinterval()
            sys.setswitchinterval(self._seconds)
            self._set = sys.getswitchinterval()  # in whole microseconds

    def restore(self) -> None:
        """Does nothing before `apply`, nor a second time."""
        if self._before is not None and sys.getswitchinterval() == self._set:
            sys.setswitchinterval(self._before)
        self._before = self._set = None
