"""Grammars that turned out too costly to follow. They are refused at once for a while."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from penstock.runtime.requests.grammar import Grammar, GrammarKind

REFUSED_S = 60.0
"""For this many seconds no request may use such a grammar again."""
MOST = 1024
"""How many are remembered; beyond that the one that was noted first is forgotten."""


class Costly:
    """Remembers sources by their digests. Safe to use from many threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def note(self, grammar: Grammar) -> None:
        """Note that a grammar cost too much. The server's own grammar for any JSON object cannot do so, and
        is never noted, because everybody uses it.
        """
        if grammar.kind is GrammarKind.JSON_OBJECT:
            return
        key = _digest(grammar)
        with self._lock:
            self._until.pop(key, None)
            self._until[key] = self._clock() + REFUSED_S
            while len(self._until) > MOST:
                self._until.popitem(last=False)

    def refused_s(self, grammar: Grammar) -> int:
        """Say for how many more seconds, rounded up, a grammar is refused; 0 if it is not."""
        with self._lock:
            if not self._until:
                return 0
            until = self._until.get(_digest(grammar))
            return 0 if until is None else max(0, math.ceil(until - self._clock()))


def _digest(grammar: Grammar) -> bytes:
    """Compute a digest of what the caller wrote, without what the server puts before it."""
    texts = (grammar.source,) if isinstance(grammar.source, str) else grammar.source
    digest = hashlib.sha256(grammar.kind.value.encode())
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8))
        digest.update(data)
    return digest.digest()
