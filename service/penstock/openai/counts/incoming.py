"""Bounds what the bodies of requests may hold together while they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.openai.failures import ApiError


class Incoming:
    """Bounds the bytes of bodies that are on their way in. Used on the event loop only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0
        """How many bytes are counted now."""

    @contextmanager
    def counted(self) -> Iterator[Callable[[int], None]]:
        """Give a function that counts bytes which have come, until the end of the block. It raises ApiError
        if there are too many.
        """
        held = 0

        def take(count: int) -> None:
            nonlocal held
            if self.held + count > self._most:
                raise ApiError(
                    503, "too many bodies are on their way in", "server_error", None, "busy", retry_after=1.0
                )
            self.held += count
            held += count

        try:
            yield take
        finally:
            self.held -= held
