"""A journal that any thread may write, and whose entries are read in batches on a thread of its own. No jax.

Writing costs an append, so that the engine's thread may do it at every step. All that readers do with the
entries, such as adding them up or making spans of them, is done on the journal's thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from penstock.runtime.loop.journal.entries import Entry

log = logging.getLogger(__name__)

Reader = Callable[[Sequence[Entry]], None]
"""Takes the next entries, in the order in which they were written. Its calls never overlap."""

INTERVAL_S = 0.1
"""How long an entry waits at most before the journal's thread reads it, if that thread is not busy."""
BATCH = 1_000
"""So many entries are read at once, and from so many on they are read at once without waiting."""


class Journal:
    """Takes entries from any thread, and hands them to its readers. While there is no reader it keeps
    nothing.
    """

    def __init__(self, most: int = 16_384) -> None:
        """At most `most` entries wait to be read; more are dropped, and counted."""
        self.is_read = False
        """Whether there is a reader. Who writes should look here first, and then need not make an entry."""
        self.dropped = 0
        """How many entries were dropped because too many waited to be read."""
        self._most = most
        self._entries: deque[Entry] = deque()
        self._dropping = threading.Lock()  # of `dropped` alone
        self._readers: list[Reader] = []
        self._reading = threading.RLock()
        self._is_reading = False
        self._wake = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._before_flush: Callable[[], None] = lambda: None

    # -- writing --

    def write(self, entry: Entry) -> None:
        """Adds an entry. It never waits. Without a reader, nothing is kept."""
        if not self.is_read:
            return
        num_waiting = len(self._entries)
        if num_waiting >= self._most:
            with self._dropping:
                self.dropped += 1
            return
        self._entries.append(entry)
        if num_waiting >= BATCH and not self._wake.is_set():
            self._wake.set()

    def before_flush(self, callback: Callable[[], None]) -> None:
        """Calls `callback` at the beginning of each `flush`: it waits until the writer has written what it
        holds back.
        """
        self._before_flush = callback

    # -- reading --

    def read_by(self, reader: Reader) -> Callable[[], None]:
        """Adds a reader, which gets the entries that are written from now on. It is called on the journal's
        thread, every INTERVAL_S or when BATCH entries wait, and by whoever flushes. If it raises, that is
        logged, and it gets no more entries.

        Returns a function that ends it, after it has got what was written before. This may be called twice,
        and by the reader itself.
        """
        with self._reading:
            if self._is_closed:
                raise RuntimeError("the journal is closed")
            if not self._is_reading:
                self._read()  # by the readers that are there already
            self._readers.append(reader)
            self.is_read = True
        self._wake.set()

        def end() -> None:
            with self._reading:
                if not self._is_reading:
                    self._read()
                self._drop(reader)

        return end

    def flush(self) -> None:
        """Blocks until the readers have got all entries that were written before, whether the journal's
        thread runs or not. A reader must not call this: RuntimeError.
        """
        self._before_flush()
        with self._reading:
            if self._is_reading:
                raise RuntimeError("a reader of the journal must not flush it")
            self._read()

    def _read(self) -> None:
        """Hands the entries that wait now to the readers; with the lock of reading held."""
        entries = self._entries
        self._is_reading = True
        try:
            left = len(entries)
            while left > 0 and entries:  # there are none any more where the last reader ended
                batch = [entries.popleft() for _ in range(min(left, len(entries), BATCH))]
                left -= len(batch)
                for reader in tuple(self._readers):
                    try:
                        reader(batch)
                    except BaseException:  # the other readers, and the engine, go on
                        log.exception("a reader of the journal failed; it gets no more entries")
                        self._drop(reader)
        finally:
            self._is_reading = False

    def _drop(self, reader: Reader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)
        if not self._readers:
            self.is_read = False
            self._entries.clear()

    # -- life --

    def start(self) -> None:
        """Starts the thread that reads. RuntimeError if it was started before."""
        if self._thread is not None:
            raise RuntimeError("the journal was started before")
        self._thread = threading.Thread(target=self._run, name="penstock-journal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Has everything read that was written, and ends the thread and the readers. May be called twice."""
        self._is_closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._reading:
            self._read()
            for reader in tuple(self._readers):
                self._drop(reader)

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(INTERVAL_S if self.is_read else None)
            self._wake.clear()
            with self._reading:
                self._read()
