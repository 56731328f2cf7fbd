"""Bounds the memory of the images that requests hold while they wait and run.

Requests keep their images as the patches that the model takes, which need a hundred times the bytes of a
photograph's file: hundreds of megabytes for a context full of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.service.errors import Busy
from penstock.service.limits.pace import Pace

LIMIT = "max_held_image_bytes"


class HeldImages:
    """The bytes of all images that requests hold. Used on the event loop only."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._pace = Pace(clock)

    @property
    def num_bytes(self) -> int:
        """How many bytes are held now."""
        return self._pace.active

    def hold(self, num_bytes: int) -> None:
        """Count so many bytes more, until `release`. Raises Busy if there would be too many; one request
        alone never has too many.
        """
        held = self._pace.active
        if held and num_bytes and held + num_bytes > self._most:
            raise Busy(LIMIT, self._most, self._pace.retry_after_s(num_bytes))
        if num_bytes:
            self._pace.entered(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Count these bytes no longer."""
        if num_bytes:
            self._pace.left(num_bytes)
