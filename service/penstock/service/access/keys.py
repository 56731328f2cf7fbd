"""The keys of a running server: reads their file at the start, and again when it is told to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.runtime.errors import ConfigError
from penstock.service.access.authentication import Authenticator
from penstock.service.access.key_file import KeyEntry
from penstock.service.access.key_store import exposed, read_keys
from penstock.service.access.keyring import utc_now
from penstock.service.access.rates import Clock
from penstock.service.threads.lanes import in_thread

log = logging.getLogger(__name__)


class Keys:
    """Keeps an authenticator up to date with a file. Used on the event loop only."""

    def __init__(self, file: Path, *, clock: Clock = time.monotonic) -> None:
        """Read the file. Raises ConfigError if it cannot be used. `clock` gives the seconds that rates are
        measured by.
        """
        self._file = file
        entries = read_keys(file)
        self.authenticator = Authenticator(entries, clock=clock)
        self._turn = asyncio.Lock()
        self._tell(entries)

    async def reload(self) -> None:
        """Read the file again. A file that cannot be used changes nothing, and one line in the
        log says why.
        """
        async with self._turn:  # one at a time, so that an older content cannot replace a newer one
            try:
                entries = await in_thread(lambda: read_keys(self._file))
            except Exception as error:  # noqa: BLE001 -- the server must go on with the keys it has
                log.error(
                    "the keys could not be read again, so the server keeps those it has: %s",
                    error if isinstance(error, ConfigError) else repr(error),
                )
                return
            self.authenticator.use(entries)
            self._tell(entries)

    def _tell(self, entries: Sequence[KeyEntry]) -> None:
        now = utc_now()
        valid = sum(not (e.revoked or (e.expires is not None and now >= e.expires)) for e in entries)
        log.info("keys: %s has %d keys, of which %d are valid", self._file, len(entries), valid)
        if not valid:
            log.warning("keys: no caller can use the server; add a key with `penstock keys add`")
        if warning := exposed(self._file):
            log.warning("keys: %s", warning)
