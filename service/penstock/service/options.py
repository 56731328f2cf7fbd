"""Options of the gRPC server, frozen and checked once."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from penstock.runtime.errors import ConfigError
from penstock.runtime.prompting.prompts import Truncation
from penstock.service.limits.bounds import Bounds
from penstock.service.listening.connections import ConnectionOptions
from penstock.service.listening.listen_options import ListenOptions, host_problems, tcp_address, unix_address
from penstock.service.replies.reply_budget import ReplyLimits
from penstock.service.requests.generate import DEFAULT_FEATURES, Features
from penstock.service.telemetry.metrics.options import MetricsOptions

MIB = 1024 * 1024
MAX_RECEIVE_BYTES = 1024 * MIB - 1
"""gRPC gets twice the configured limit (see `PenstockServer`), and its largest message has 2 GiB."""

MAX_FRONT_PROCESSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where the server listens, and how long it waits for what."""

    host: str = "127.0.0.1"
    port: int | None = 50051
    """0 lets the system choose a port; None means that the server listens on a Unix socket only."""
    listen: ListenOptions = field(default_factory=ListenOptions)
    """Further addresses, and TLS."""
    front_processes: int = 0
    """How many processes speak gRPC with the clients of `port`, in place of this one; 0: this one does."""
    keys: Path | None = None
    """The file of the keys of those who may call, made by `penstock keys`; None lets everybody call."""
    usage_file: Path | None = None
    """The file that keeps what each key used, for `penstock usage`; None keeps nothing."""
    stall_limit_s: float = 30.0
    """Seconds after which a stream that is not read, although output waits, is ended and its
    pages are freed.
    """
    grace_s: float = 20.0
    """Seconds that running requests may go on when the server stops. Together with the last replies and the
    end of the engine it fits into the 30 s that orchestrators give by default.
    """
    drain_delay_s: float = 0.0
    """Seconds at the stop in which requests are still taken while health already says NOT_SERVING, for load
    balancers that notice it late. The grace begins afterwards.
    """
    watchdog_s: float = 60.0
    """Seconds after which health turns NOT_SERVING if the engine's thread has work and does nothing, and a
    front process that does nothing is replaced; 0 means never.
    """
    connections: ConnectionOptions = field(default_factory=ConnectionOptions)
    """How long connections live."""
    max_receive_bytes: int = 8 * MIB
    """The largest request message. A prompt of a million token ids has about 3 MB, and one of a million words
    6 MB.
    """
    max_held_image_bytes: int = 4096 * MIB
    """The most bytes of images, as the model takes them, that all requests that wait or run may hold."""
    weights_roots: tuple[Path, ...] = ()
    """The directories below which files of new weights may lie, for an update by uri; none: no such updates.
    """
    profile_dir: Path | None = None
    """The folder that profiles are written to; None: Profile is refused."""
    profile_keep: int = 5
    """How many profiles stay in the folder; the oldest ones are removed."""
    truncation: Truncation = Truncation.REJECT
    """What happens to a prompt that is too long if the request does not say."""
    bounds: Bounds = field(default_factory=Bounds)
    """How much may go on at once."""
    replies: ReplyLimits = field(default_factory=ReplyLimits)
    """How large replies may get."""
    features: Features = DEFAULT_FEATURES
    """Which parts of the contract callers may use."""
    access_log: bool = True
    """Whether the log has a line for each call of Generate and Stream that was not refused."""
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    """Where metrics can be read, and how often they are pushed."""

    def __post_init__(self) -> None:
        bad = [*host_problems("host", self.host), *self.listen.problems()]
        if self.port is None:
            if self.listen.unix_socket is None:
                bad.append("port: must be given if there is no unix_socket: the server would listen nowhere")
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
        bad.extend(self._front_problems())
        bad.extend(self.connections.problems())
        bad.extend(self.metrics.problems())
        bad.extend(
            f"weights_roots: {root} is no directory" for root in self.weights_roots if not root.is_dir()
        )
        bad.extend(self._profile_problems())
        if self.max_held_image_bytes < 1:
            bad.append(f"max_held_image_bytes: must be at least 1, not {self.max_held_image_bytes}")
        if not 1 <= self.max_receive_bytes <= MAX_RECEIVE_BYTES:
            bad.append(
                f"max_receive_bytes: must be from 1 to {MAX_RECEIVE_BYTES}, not {self.max_receive_bytes}"
            )
        if not bad:
            bad.extend(self._exposure_problems())
        if bad:
            raise ConfigError("; ".join(bad))

    def _profile_problems(self) -> list[str]:
        bad = [] if self.profile_keep >= 1 else [f"profile_keep: must be at least 1, not {self.profile_keep}"]
        if self.profile_dir is not None:
            # the folder itself is made with the first profile
            there = next(path for path in (self.profile_dir, *self.profile_dir.parents) if path.exists())
            if not there.is_dir():
                bad.append(f"profile_dir: {there} is no directory")
            elif not os.access(there, os.W_OK | os.X_OK):
                bad.append(f"profile_dir: {there} cannot be written")
        return bad

    def _front_problems(self) -> list[str]:
        if not 0 <= self.front_processes <= MAX_FRONT_PROCESSES:
            return [f"front_processes: must be from 0 to {MAX_FRONT_PROCESSES}, not {self.front_processes}"]
        if self.front_processes and self.port is None:
            return ["front_processes: needs --port, because front processes serve no Unix socket"]
        if 0 < self.bounds.max_connections < self.front_processes:
            most, processes = self.bounds.max_connections, self.front_processes
            return [f"max_connections: must be at least front_processes, which is {processes}, not {most}"]
        return []

    def _exposure_problems(self) -> list[str]:
        if self.listen.tls is not None and not self.hosts:
            return ["tls_cert: needs a port, because a Unix socket does not speak TLS"]
        problem = self.listen.exposure_problem(self.hosts, keys=self.keys is not None)
        return [] if problem is None else [problem]

    def address(self, port: int | None = None) -> str:
        """Write the address as gRPC reads it: host:port, with brackets around IPv6; without a port the Unix
        socket.
        """
        port = self.port if port is None else port
        if port is None:
            assert self.listen.unix_socket is not None, "checked when these options were made"
            return unix_address(self.listen.unix_socket)
        return tcp_address(self.host, port)

    @property
    def control_host(self) -> str:
        """The host of the control port, if there is one."""
        return self.listen.control_host or self.host

    @property
    def num_addresses(self) -> int:
        """How many addresses this process itself listens on: ports and the Unix socket."""
        return len(self.hosts) + (self.listen.unix_socket is not None) - bool(self.front_processes)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of all ports."""
        main = () if self.port is None else (self.host,)
        return main if self.listen.control_port is None else (*main, self.control_host)

    @property
    def lacking(self) -> list[str]:
        """What a server that other machines can reach should have and this one lacks."""
        return self.listen.lacking(self.hosts, keys=self.keys is not None)
