"""Counts what an engine has taken of the updates that are sent to it, so that a test ends a pusher at exactly
the message that it means.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.runtime.updating.upload import Upload
from tests.service.rig import until


class Progress:
    """Of the updates that have begun since this was made."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self.begun = 0
        self.bytes = 0
        """Of all chunks that were taken since the last update began."""
        self._open: set[int] = set()
        updater = type(engine.updater)
        begin, write, close = updater.begin, Upload.write, Upload.close

        def counted_begin(*args: Any, **more: Any) -> Any:
            upload = begin(*args, **more)
            with self._lock:
                self.begun += 1
                self.bytes = 0
                self._open.add(id(upload))
            return upload

        def counted_write(upload: Upload, index: int, offset: int, data: bytes) -> None:
            write(upload, index, offset, data)
            with self._lock:
                self.bytes += len(data)

        def counted_close(upload: Upload) -> None:
            close(upload)
            with self._lock:
                self._open.discard(id(upload))

        monkeypatch.setattr(updater, "begin", counted_begin)
        monkeypatch.setattr(Upload, "write", counted_write)
        monkeypatch.setattr(Upload, "close", counted_close)

    async def taken(self, begun: int, num_bytes: int) -> None:
        """Wait until this many updates have begun, and this many bytes of the last one were taken."""
        await until(lambda: (self.begun, self.bytes) == (begun, num_bytes))

    async def closed(self) -> None:
        """Wait until no update is open."""
        await until(lambda: not self._open)
