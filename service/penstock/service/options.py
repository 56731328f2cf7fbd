"""Options of the gRPC front: frozen, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from penstock.runtime.errors import ConfigError
from penstock.runtime.requests.context import Truncation
from penstock.service.limits.bounds import Bounds
from penstock.service.listening.connections import ConnectionOptions
from penstock.service.listening.listen_options import ListenOptions, host_problems, tcp_address, unix_address
from penstock.service.replies.reply_limits import ReplyLimits
from penstock.service.requests.features import DEFAULT_FEATURES, Features

MIB = 1024 * 1024
MAX_RECEIVE_BYTES = 1024 * MIB - 1
"""gRPC, whose largest message has 2 GiB, is told twice the limit: see `PenstockServer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where the server listens and how long it waits for whom."""

    host: str = "127.0.0.1"
    port: int | None = 50051
    """0 lets the system choose one; None: listen on a Unix socket only."""
    listen: ListenOptions = field(default_factory=ListenOptions)
    """Other addresses, and TLS."""
    keys: Path | None = None
    """Who may call: a file that `penstock keys` makes; None: everybody."""
    usage_file: Path | None = None
    """Where to keep what each key used: a file for `penstock usage`; None: nowhere."""
    stall_limit_s: float = 30.0
    """A stream that is not read for so long while output waits is ended, and its pages are freed."""
    grace_s: float = 20.0
    """At the stop: how long running requests may go on. With what comes after, replies on their way out and
    the end of the engine, it fits the 30 s that orchestrators give unless told otherwise."""
    drain_delay_s: float = 0.0
    """At the stop: how long requests are still taken while health already says NOT_SERVING, for balancers
    that hear of it late. The grace begins after it."""
    watchdog_s: float = 60.0
    """Health is NOT_SERVING while the engine's thread has work and did nothing for so long; 0: never."""
    connections: ConnectionOptions = field(default_factory=ConnectionOptions)
    """How long connections live."""
    max_receive_bytes: int = 8 * MIB
    """Largest request message: a prompt of a million token ids has about 3 MB, and a million words 6 MB."""
    truncation: Truncation = Truncation.REJECT
    """What becomes of a prompt that is too long, where the request does not say."""
    bounds: Bounds = field(default_factory=Bounds)
    """How much may go on at once."""
    replies: ReplyLimits = field(default_factory=ReplyLimits)
    """How large replies may get."""
    features: Features = DEFAULT_FEATURES
    """What callers may use."""

    def __post_init__(self) -> None:
        bad = [*host_problems("host", self.host), *self.listen.problems()]
        if self.port is None:
            if self.listen.unix_socket is None:
                bad.append("port: none needs a unix_socket, or the server would listen nowhere")
        elif not 0 <= self.port <= 65535:
            bad.append(f"port: must be from 0 to 65535, not {self.port}")
        if not (math.isfinite(self.stall_limit_s) and self.stall_limit_s > 0):
            bad.append(f"stall_limit_s: must be above 0, not {self.stall_limit_s}")
        for name, seconds in (
            ("grace_s", self.grace_s),
            ("drain_delay_s", self.drain_delay_s),
            ("watchdog_s", self.watchdog_s),
        ):
            if not (math.isfinite(seconds) and seconds >= 0):
                bad.append(f"{name}: must be at least 0, not {seconds}")
        bad.extend(self.connections.problems())
        if not 1 <= self.max_receive_bytes <= MAX_RECEIVE_BYTES:
            bad.append(
                f"max_receive_bytes: must be from 1 to {MAX_RECEIVE_BYTES}, not {self.max_receive_bytes}"
            )
        if not bad:
            bad.extend(self._exposure_problems())
        if bad:
            raise ConfigError("; ".join(bad))

    def _exposure_problems(self) -> list[str]:
        if self.listen.tls is not None and not self.hosts:
            return ["tls_cert: there is no port that could speak TLS; a Unix socket does not"]
        problem = self.listen.exposure_problem(self.hosts, keys=self.keys is not None)
        return [] if problem is None else [problem]

    def address(self, port: int | None = None) -> str:
        """host:port as gRPC and people read it, IPv6 in brackets; without a port the Unix socket."""
        port = self.port if port is None else port
        if port is None:
            assert self.listen.unix_socket is not None, "checked when these options were made"
            return unix_address(self.listen.unix_socket)
        return tcp_address(self.host, port)

    @property
    def control_host(self) -> str:
        """Where the control port is, if there is one."""
        return self.listen.control_host or self.host

    @property
    def num_addresses(self) -> int:
        """On how many the server listens: ports and the Unix socket."""
        return len(self.hosts) + (self.listen.unix_socket is not None)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Those with a port."""
        main = () if self.port is None else (self.host,)
        return main if self.listen.control_port is None else (*main, self.control_host)

    @property
    def lacking(self) -> list[str]:
        """What a server that other machines can reach should have and this one has not."""
        return self.listen.lacking(self.hosts, keys=self.keys is not None)
