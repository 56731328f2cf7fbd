"""How many messages may be on their way in at once.

gRPC holds a message in memory until the last byte of it is here, and fetches more than its first kilobytes
only when it is asked for it. So asking is done by turns: whoever sends the first megabytes of thousands of
messages, and never the rest, has the memory of a few of them. Messages of honest clients wait for nobody as
long as fewer than that are on their way, and else for little.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from penstock.service.admission import Kind, address_of

_WORK = (Kind.WORK, Kind.TOKENIZE)


class _Line:
    """Those of one address, who take turns."""

    __slots__ = ("length", "turns")

    def __init__(self, most: int) -> None:
        self.turns = asyncio.Semaphore(most)
        self.length = 0
        """With a turn, or waiting for one."""


class Turns:
    """So many at once. One address has at most half of them, so that it keeps nobody else waiting."""

    def __init__(self, most: int) -> None:
        """`most`: messages at once; 0: any number."""
        self._turns = asyncio.Semaphore(most) if most else None
        self._most_of_one = (most + 1) // 2
        self._lines: dict[str, _Line] = {}

    @property
    def num_addresses(self) -> int:
        """How many addresses send something, or wait to."""
        return len(self._lines)

    @contextlib.asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[None]:
        """Wait for a turn, first among those of the same address, and have it inside. `peer` is as for
        `Admission`.
        """
        if self._turns is None:
            yield
            return
        address = address_of(peer) or peer
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = _Line(self._most_of_one)
        line.length += 1
        try:
            async with line.turns, self._turns:
                yield
        finally:
            line.length -= 1
            if not line.length:
                del self._lines[address]


class Receiving:
    """The turns of one server: those that matter for work, and a few for each other kind, which are small."""

    def __init__(self, most: int) -> None:
        """`most`: messages of work at once; 0: any number of any kind."""
        few = most and max(most // 8, 2)
        work = Turns(most)
        self._turns = {kind: work if kind in _WORK else Turns(few) for kind in Kind}

    def turn(self, kind: Kind, peer: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait for a turn, and have it inside."""
        return self._turns[kind].turn(peer)
