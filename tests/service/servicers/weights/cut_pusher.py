"""A pusher in a process of its own, to be killed. Its arguments are an address and a file.

It sends the messages in the file, each behind eight bytes of its length, and neither goes on nor ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc


def main(address: str, file: Path) -> None:
    data = file.read_bytes()

    def messages() -> Iterator[bytes]:
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            yield data[at + 8 : at + 8 + size]
            at += 8 + size
        threading.Event().wait()

    with grpc.insecure_channel(address) as channel:
        update: Any = channel.stream_unary("/penstock.v1.InferenceService/UpdateWeights")
        update(messages())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
