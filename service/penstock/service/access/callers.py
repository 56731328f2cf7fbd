"""A caller: the id and the roles that its key or certificate gives it."""

from __future__ import annotations

import enum
import hashlib
from contextvars import ContextVar
from dataclasses import dataclass, field


class Role(enum.Enum):
    """What a caller may do."""

    INFER = "infer"
    """May call Generate, Stream, Embed, Score, Rerank, Classify, Tokenize and Detokenize, ask for
    information, and abort its own requests.
    """
    CONTROL = "control"
    """May do everything, also to other callers' requests: abort, flush, pause, update weights."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call."""

    id: str
    """The id of the key or the certificate; empty on a server without keys."""
    roles: frozenset[Role]
    models: frozenset[str] = frozenset()
    """The served models that it may use; empty means all."""
    adapters: frozenset[str] = frozenset()
    """The adapters that it may use and change; empty means all. Each may use the model without one."""
    cache_secret: str = field(default="", repr=False)
    """Keeps its cached prefixes apart from other callers'; empty means that they are shared."""

    @property
    def controls(self) -> bool:
        return Role.CONTROL in self.roles

    def allows_adapter(self, name: str) -> bool:
        """Say whether the caller may use, and with CONTROL change, the adapter of this name."""
        return not self.adapters or name in self.adapters

    def cache_salt(self, salt: str) -> str:
        """Return the salt that the engine uses when the caller asked for `salt`."""
        if not self.cache_secret:
            return salt
        return hashlib.sha256(f"{self.cache_secret}\x00{salt}".encode()).hexdigest()


ANYBODY = Caller("", frozenset(Role))
"""Every caller of a server without keys."""

CURRENT_CALLER: ContextVar[Caller] = ContextVar("penstock_caller", default=ANYBODY)
"""The caller of the RPC that this task serves. The interceptor sets it before it calls the servicer."""
