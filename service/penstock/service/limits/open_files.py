"""The limit on the files that the process may have open; every connection is one of them."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

FOR_OTHERS = 256
"""Open files kept free for everything but connections: weights, compiled programs, pipes to the processes
that compile grammars.
"""
MANY = 65_536
"""The limit for a server whose connections have no bound."""


def raise_limit(wanted: int) -> None:
    """Allow this process `wanted` open files, or as many as the system permits. A common default is only
    1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def connections(wanted: int, num_addresses: int = 1) -> int:
    """How many connections each listening address may have: as many as `wanted`, or fewer, so that open files
    are left for the rest of the process; 0 stays 0.

    Without this a server that is full of connections would have no file left to work with.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    room = max(max(soft - FOR_OTHERS, soft // 2) // num_addresses, 1)
    if wanted <= room:
        return wanted
    log.warning(
        "an address may have %d connections, not %d: the process may open only %d files; raise `ulimit -n`",
        room,
        wanted,
        soft,
    )
    return room
