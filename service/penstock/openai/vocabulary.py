"""What tokens look like, so that log-probabilities can be shown without a tokenizer. It is fetched once for
as long as the same server runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.client import AsyncClient
from penstock.openai.calls import Call, Shared

CHECK_S: Final = 10.0
"""For how long a vocabulary is used before the server is asked whether it still runs."""
MOST_INSTANCES: Final = 64
"""How many starts of servers with the same vocabulary are remembered: there are several where the address
names several servers.
"""
_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of all tokens of the served model."""

    pieces: Sequence[bytes]
    """The bytes of each token, by its id. A special token has the bytes of its name."""
    special: frozenset[int]
    """The special tokens, which are left out of a text."""
    dropped_leading_spaces: int = 0
    """How many spaces a text loses at its start, if it begins with so many."""

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that the tokenizer does not have."""
        return self.pieces[token_id] if token_id < len(self.pieces) else b""

    def text_of(self, token_ids: Sequence[int], *, with_special: bool) -> str:
        """The text of tokens. Special ones are left out of it unless it is told to have them."""
        hidden = frozenset[int]() if with_special else self.special
        text = b"".join(self.bytes_of(i) for i in token_ids if i not in hidden).decode("utf-8", "replace")
        return text[min(self.dropped_leading_spaces, len(text) - len(text.lstrip(" "))) :]


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
            told = await self._client.vocabulary(timeout=_TIMEOUT_S, metadata=call.metadata)
            new = Vocabulary(told.tokens, told.special_token_ids, told.dropped_leading_spaces)
            if kept is None or new != kept:
                kept = self._kept = new
                self._instances.clear()
            self._instances[server.instance_id] = None
            if len(self._instances) > MOST_INSTANCES:
                del self._instances[next(iter(self._instances))]
        self._until = self._clock() + CHECK_S
        return kept
