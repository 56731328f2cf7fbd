"""Who makes a call: the id and the roles that its key or certificate gives."""

from __future__ import annotations

import enum
import hashlib
from contextvars import ContextVar
from dataclasses import dataclass, field


class Role(enum.Enum):
    """What a caller may do."""

    INFER = "infer"
    """Generate, Stream, Tokenize, Detokenize, information, and to abort one's own requests."""
    CONTROL = "control"
    """Everything of everybody: abort, flush, pause, weights."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One caller."""

    id: str
    """Of the key or the certificate; empty for a caller that nobody asked for one."""
    roles: frozenset[Role]
    models: frozenset[str] = frozenset()
    """Served models that it may use; empty: all."""
    cache_secret: str = field(default="", repr=False)
    """Keeps its cached prefixes apart from everybody else's; empty: they are shared."""

    @property
    def controls(self) -> bool:
        return Role.CONTROL in self.roles

    def cache_salt(self, salt: str) -> str:
        """The salt that the engine is to use where the caller asked for `salt`."""
        if not self.cache_secret:
            return salt
        return hashlib.sha256(f"{self.cache_secret}\x00{salt}".encode()).hexdigest()


ANYBODY = Caller("", frozenset(Role))
"""Every caller of a server without keys."""

CURRENT_CALLER: ContextVar[Caller] = ContextVar("penstock_caller", default=ANYBODY)
"""Whose RPC this task is. The interceptor sets it before a servicer's method is called."""
