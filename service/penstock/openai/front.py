"""What all requests of one worker share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Self

from starlette.requests import Request

from penstock.openai.backend import Backend
from penstock.openai.counts import Incoming, Life, Meters
from penstock.openai.settings import Settings
from penstock.openai.store import ResponseStore


@dataclass(frozen=True, slots=True)
class Front:
    """What all requests of one worker share. Make it inside a coroutine."""

    settings: Settings
    backend: Backend
    meters: Meters
    incoming: Incoming
    store: ResponseStore | None = None
    """What keeps responses; None where none are kept."""
    life: Life = field(default_factory=Life)
    heavy: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a large body is parsed in a thread: one at a time, so that the event loop gets the
    interpreter.
    """

    @classmethod
    def made(cls, settings: Settings) -> Self:
        """Make the front of these settings. Raises ValueError for TLS files, tokens and a store that cannot
        be used.
        """
        incoming = Incoming(settings.max_waiting_body_bytes)
        return cls(settings, Backend(settings), Meters(), incoming, ResponseStore.of(settings))

    async def close(self) -> None:
        """Close the connection to the server, and the store."""
        await self.backend.close()
        if self.store is not None:
            self.store.close()


def front_of(request: Request) -> Front:
    """Return the front that a request came to."""
    front: Front = request.app.state.front
    return front
