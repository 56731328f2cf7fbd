"""What a process of `children` does first: it ties its life to the server's, and gives up what it has no use
for. The standard library, and nothing else: this is imported by processes that are to start quickly.

What a process needs of files it must have read before `confine`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import sys
from multiprocessing.connection import Connection

_NOBODY = 65534
_PR_SET_NO_NEW_PRIVS = 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
"""System calls; these have the same numbers on all architectures."""
_LANDLOCK_VERSION = 1


def connect() -> Connection:
    """The connection to the server, once this process cannot outlive it."""
    connection, lifeline = map(int, sys.argv[1:3])
    _end_with_parent(lifeline)
    return Connection(connection)


def _end_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process and all that it starts when the server has gone.

    The server holds the other end of this pipe. Once that is closed, which the kernel does however the server
    ends, the end here becomes readable, of which the kernel tells by a signal of our choice: SIGKILL, which
    no computation delays. (PR_SET_PDEATHSIG would tell of the end of the server's *thread* that started us.)
    """
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):  # it has gone before the kernel knew that we want to be told
        os._exit(1)


def confine() -> None:
    """Give up, as far as this kernel and this user can: files, the network, other processes, privileges.

    Nothing here can be taken back. Where the kernel is too old for one of the measures the others hold.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    _deny_files_and_network(libc)
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a container may know no other user
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def limit_memory(more: int) -> None:
    """Let the address space grow by `more` bytes from here."""
    most = address_space() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def address_space() -> int:
    """Bytes of it that this process has."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _deny_files_and_network(libc: ctypes.CDLL) -> None:
    """Landlock, with no rule that allows anything: no file is opened, made, renamed or removed, nothing is
    executed, no TCP port is bound or connected to, and (where the kernel knows that) no process outside gets
    a signal.
    """
    version = libc.syscall(
        ctypes.c_long(_LANDLOCK_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(_LANDLOCK_VERSION)
    )
    if version < 1:
        return
    files = (1 << 13) - 1
    files |= sum(1 << right for right, since in ((13, 2), (14, 3), (15, 5)) if version >= since)
    network = 0b11 if version >= 4 else 0
    scoped = 0b11 if version >= 6 else 0
    rules = (ctypes.c_uint64 * 3)(files, network, scoped)
    size = 8 * (3 if version >= 6 else 2 if version >= 4 else 1)
    ruleset = libc.syscall(
        ctypes.c_long(_LANDLOCK_CREATE_RULESET), ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint(0)
    )
    if ruleset < 0:
        return
    libc.syscall(ctypes.c_long(_LANDLOCK_RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint(0))
    os.close(ruleset)
