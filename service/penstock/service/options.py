"""Options of the gRPC front: frozen, checked once."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field

from penstock.runtime.chat.parser import REASONING_PARSERS, TOOL_PARSERS
from penstock.runtime.errors import ConfigError
from penstock.service.bounds import Bounds
from penstock.service.context import Truncation

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where the server listens and how long it waits for whom."""

    host: str = "127.0.0.1"
    port: int = 50051
    """0 lets the system choose one."""
    stall_limit_s: float = 30.0
    """A stream that is not read for so long while output waits is ended, and its pages are freed."""
    grace_s: float = 30.0
    """On SIGTERM: how long running requests may go on."""
    max_receive_bytes: int = 64 * MIB
    """Largest request message."""
    truncation: Truncation = Truncation.REJECT
    """What becomes of a prompt that is too long, where the request does not say."""
    tool_call_parser: str = "auto"
    """The form in which the model writes calls of tools; auto: told from its chat template."""
    reasoning_parser: str = "auto"
    """The same for what it thinks."""
    bounds: Bounds = field(default_factory=Bounds)
    """How much may go on at once."""

    def __post_init__(self) -> None:
        bad: list[str] = []
        if not self.host:
            bad.append("host: must not be empty")
        if not 0 <= self.port <= 65535:
            bad.append(f"port: must be from 0 to 65535, not {self.port}")
        if not (math.isfinite(self.stall_limit_s) and self.stall_limit_s > 0):
            bad.append(f"stall_limit_s: must be above 0, not {self.stall_limit_s}")
        if not (math.isfinite(self.grace_s) and self.grace_s >= 0):
            bad.append(f"grace_s: must be at least 0, not {self.grace_s}")
        if not 1 <= self.max_receive_bytes < 2**31:
            bad.append(f"max_receive_bytes: must be from 1 to 2147483647, not {self.max_receive_bytes}")
        for name, value, known in (
            ("tool_call_parser", self.tool_call_parser, TOOL_PARSERS),
            ("reasoning_parser", self.reasoning_parser, REASONING_PARSERS),
        ):
            if value not in known:
                bad.append(f"{name}: must be one of {', '.join(known)}, not {value!r}")
        if bad:
            raise ConfigError("; ".join(bad))

    def address(self, port: int | None = None) -> str:
        """host:port as gRPC and people read it; IPv6 in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port if port is None else port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
