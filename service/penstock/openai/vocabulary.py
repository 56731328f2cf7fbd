"""Keeps the vocabulary, which shows what tokens look like without a tokenizer. It is fetched once for as long
as the same server runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from penstock.client import AsyncClient, Vocabulary
from penstock.openai.calls import Call, Shared

CHECK_S: Final = 10.0
"""For how long a vocabulary is used before the server is asked whether it still runs."""
MOST_INSTANCES: Final = 64
"""How many starts of servers with the same vocabulary are remembered: there are several where the address
names several servers.
"""
_TIMEOUT_S: Final = 10.0


class Vocabularies:
    """Keeps one vocabulary. It belongs to one event loop."""

    def __init__(self, client: AsyncClient, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self._client = client
        self._clock = clock
        self._kept: Vocabulary | None = None
        self._instances: dict[str, None] = {}
        """The starts of servers that have the kept vocabulary, the oldest ones first."""
        self._until = 0.0
        self._asking = Shared(self._ask)

    async def of(self, call: Call) -> Vocabulary:
        """The vocabulary, asked for with the caller's key where it is not known. Raises the client's
        errors.
        """
        if self._kept is not None and self._clock() < self._until:
            return self._kept
        return await self._asking.of(call)

    def forget(self) -> None:
        """Look at the next request whether the same server still runs."""
        self._until = 0.0

    async def close(self) -> None:
        """End what is under way."""
        await self._asking.close()

    async def _ask(self, call: Call) -> Vocabulary:
        server = await self._client.server_info(timeout=_TIMEOUT_S, metadata=call.metadata)
        kept = self._kept
        if kept is None or server.instance_id not in self._instances:
            new = await self._client.vocabulary(timeout=_TIMEOUT_S, metadata=call.metadata)
            if kept is None or new != kept:
                kept = self._kept = new
                self._instances.clear()
            self._instances[server.instance_id] = None
            if len(self._instances) > MOST_INSTANCES:
                del self._instances[next(iter(self._instances))]
        self._until = self._clock() + CHECK_S
        return kept
