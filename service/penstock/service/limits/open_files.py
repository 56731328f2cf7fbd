"""How many files the process may have open, of which every connection is one."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

FOR_OTHERS = 256
"""Files that are no connections: weights, compiled programs, pipes to the processes that compile grammars."""
MANY = 65_536
"""For a server whose connections have no bound."""


def raise_limit(wanted: int) -> None:
    """Allow this process so many open files, or as many as the system lets it have: 1,024 is a common
    default, from times when programs could not deal with more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def connections(wanted: int, num_addresses: int = 1) -> int:
    """Of each listening address: as many as wanted, or as many as leave some open files to the rest of the
    process; 0 stays 0.

    Without this the server would not only have no file for one connection more, but also none to work with.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    room = max(max(soft - FOR_OTHERS, soft // 2) // num_addresses, 1)
    if wanted <= room:
        return wanted
    log.warning(
        "at most %d connections of an address, not %d: the process may have %d files open (`ulimit -n`)",
        room,
        wanted,
        soft,
    )
    return room
