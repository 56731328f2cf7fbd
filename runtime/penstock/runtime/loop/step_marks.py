"""What the loop tells a profiler: the names of what it does, and the end of each step. No jax."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

Annotate = Callable[..., AbstractContextManager[object]]
"""Makes a context whose block a profiler shows under this name, with these facts as keyword arguments."""

StepWatch = Callable[[int, int], None]
"""Is told of the end of a step, on the engine's thread: when its plan was begun, in monotonic ns, and how
many steps it held, which is 1 but for windows. It must not block, nor raise."""


def unannotated(_name: str, **_facts: int) -> AbstractContextManager[object]:
    """An `Annotate` for a loop that no profiler looks at."""
    return contextlib.nullcontext()
