"""Shows how much of an update has been sent: as a bar, or to a function of the caller's."""

from __future__ import annotations

import importlib
import sys
from types import TracebackType
from typing import Any, Self

from penstock.client.weights.update import Update


class Tracker:
    """Tells the progress of one attempt at an update. It may be told from another thread, in turn."""

    def __init__(self, update: Update) -> None:
        self._sent = 0
        self._total = update.num_bytes
        self._told = update.progress if callable(update.progress) else None
        self._bar = _bar(self._total) if update.progress is True and update.needs_chunks else None

    def add(self, num_bytes: int) -> None:
        """Count bytes that were sent."""
        if not num_bytes:
            return
        self._sent += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        if self._told is not None:
            self._told(self._sent, self._total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(total: int) -> Any:
    """A bar of tqdm on stderr, or None if that is no terminal. Who shows none does not need tqdm."""
    if not sys.stderr.isatty():
        return None
    tqdm = importlib.import_module("tqdm").tqdm
    return tqdm(total=total, desc="Sending weights", unit="B", unit_scale=True, leave=False)
