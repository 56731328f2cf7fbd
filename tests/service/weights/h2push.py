"""A pusher that speaks HTTP/2 by hand, so that it can stop anywhere: between two messages, or in the middle
of one, and end in ways that no gRPC client ends.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from tests.service.h2peer import DATA, END_STREAM, Peer, frame, grpc_message
from tests.service.weights.pushing import Message

METHOD = "/penstock.v1.InferenceService/UpdateWeights"
MOST = 16_000
"""Bytes of one frame. All that is sent on one stream here stays below HTTP/2's first window, 65,535."""


class Pusher:
    """One connection with one stream of UpdateWeights."""

    def __init__(self, address: str) -> None:
        self.peer = Peer(address, initial_window=1 << 16)
        self.stream = 0

    async def begin(self) -> None:
        """Connect and send the headers."""
        await self.peer.__aenter__()
        self.stream = await self.peer.call(METHOD, None, end=False)

    async def send(self, messages: Sequence[Message], cut: int = 0) -> None:
        """Send these messages, the last one without its last `cut` bytes."""
        data = b"".join(grpc_message(message.SerializeToString()) for message in messages)
        data = data[: len(data) - cut]
        for at in range(0, len(data), MOST):
            await self.peer.send(frame(DATA, 0, self.stream, data[at : at + MOST]))

    async def half_close(self) -> None:
        """Say that no message follows."""
        await self.peer.send(frame(DATA, END_STREAM, self.stream))

    async def reset(self) -> None:
        """Reset the stream, and leave the connection open."""
        await self.peer.reset(self.stream)

    async def vanish(self) -> None:
        """Reset the connection, as the system of a process that is killed with unread data does."""
        raw = self.peer.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.peer.close()

    async def close(self) -> None:
        """Close the connection without a word of HTTP/2."""
        await self.peer.close()
