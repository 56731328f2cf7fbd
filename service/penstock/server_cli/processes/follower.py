"""The process of a follower: it makes the calls of a leader's runner, and ends with the group."""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError, GroupEnded
from penstock.runtime.following.interface import GroupOptions
from penstock.server_cli.serving.group_flags import GroupFlags, leader_address
from penstock.service.group.link import FollowerLink
from penstock.service.options import ServerOptions

if TYPE_CHECKING:
    from penstock.client.connection.address import Access

log = logging.getLogger("penstock.follow")

GROUP_ENDED = 75
"""The exit status of a process whose group has ended: start it again. It is EX_TEMPFAIL of sysexits.h."""


@dataclass(frozen=True, slots=True)
class Follower:
    """What one follower does."""

    model: str
    config: EngineConfig
    group: GroupOptions
    options: ServerOptions
    """Of the leader, whose command line differs only in the number of the process."""
    flags: GroupFlags

    def run(self) -> int:
        """Follow the leader until it stops. Returns 0 if this process was told to stop, and GROUP_ENDED if
        not: started again, it waits for the next leader. Raises ConfigError if this process cannot follow.
        Ends the process with GROUP_ENDED if the group has ended in another way.
        """
        from penstock.client.connection.address import endpoint  # noqa: PLC0415  # only followers call servers

        address = leader_address(self.flags, self.group, self.options)
        try:
            where = endpoint(address, self._access())
        except ValueError as error:
            raise ConfigError(f"leader: {error}") from error
        channel = (
            grpc.insecure_channel(where.target, where.options)
            if where.credentials is None
            else grpc.secure_channel(where.target, where.credentials, where.options)
        )
        log.info(
            "process %d of %d looks for its leader at %s",
            self.group.process_id,
            self.group.processes,
            address,
        )
        link = FollowerLink(channel, where.metadata, self.group, end_now)
        signals = _leave_on_signals(link)
        try:
            # Imported here, because JAX takes a second to load, and a mistake should be told before.
            from penstock.runtime.follower import follow  # noqa: PLC0415

            follow(self.model, self.config, self.group, link, weights_roots=self.options.weights_roots)
        except ConfigError as error:
            link.fail(str(error))
            raise
        except GroupEnded as error:
            if not link.is_stopped:
                end_now(error)
            log.info("%s", error)
        except BaseException as error:
            log.exception("the follower failed")
            link.fail(repr(error))
            end_now(GroupEnded(repr(error)))
        log.info("process %d of the group has stopped", self.group.process_id)
        return 0 if signals else GROUP_ENDED

    def _access(self) -> Access:
        from penstock.client.connection.address import Access  # noqa: PLC0415  # as above
        from penstock.client.connection.channel import Tls  # noqa: PLC0415  # as above

        listen = self.options.listen
        tls: Tls | bool = False
        if listen.tls_cert is not None or self.flags.group_ca is not None:
            shown = listen.client_ca is not None
            tls = Tls(
                self.flags.group_ca,
                listen.tls_cert if shown else None,
                listen.tls_key if shown else None,
            )
        token = (os.environ.get("PENSTOCK_TOKEN") or "").strip() or None
        # The patches of a large image are one call of the leader's, and larger than what clients receive.
        unbounded = (("grpc.max_receive_message_length", -1),)
        return Access(tls=tls, token=token, insecure=listen.insecure, options=unbounded)


def end_now(error: GroupEnded) -> None:
    """End this process without waiting for a thread that may hang in a collective, which nothing can
    interrupt.
    """
    log.error("%s", error)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(GROUP_ENDED)


def _leave_on_signals(link: FollowerLink) -> list[int]:
    """Let the first SIGTERM or SIGINT ask the leader to stop, and the second end the process. The signals
    that come are put into the list that is returned.
    """
    asked: list[int] = []

    def stop(number: int, _frame: Any) -> None:
        if asked:
            os._exit(128 + number)
        asked.append(number)
        link.leave()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return asked
