"""What a process of `children` does first: it ties its life to the server's, and gives up the rights that it
does not need. It imports the standard library only, because processes that must start quickly import it.

A process must read all files that it needs before it calls `confine`.
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
"""Numbers of system calls, which are the same on all architectures."""
_LANDLOCK_VERSION = 1


def connect() -> Connection:
    """Return the connection to the server, after making sure that this process cannot outlive the server."""
    connection, lifeline = map(int, sys.argv[1:3])
    _end_with_parent(lifeline)
    return Connection(connection)


def _end_with_parent(lifeline: int) -> None:
    """Make the kernel kill this process and all that it starts when the server has ended.

    The server holds the other end of this pipe. When that is closed, which the kernel does however the server
    ends, the end here becomes readable, and the kernel reports that by a signal of our choice: SIGKILL, which
    no computation delays. (PR_SET_PDEATHSIG would report the end of the server's *thread* that started this
    process.)
    """
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):  # the server ended before the kernel was asked to report it
        os._exit(1)


def confine() -> None:
    """Give up files, the network, other processes and privileges, as far as this kernel and this user allow.

    None of this can be taken back. If the kernel is too old for one of the measures, the others still hold.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    _deny_files_and_network(libc)
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a container may have no other user
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def limit_memory(more: int) -> None:
    """Let the address space grow by at most `more` bytes from now on."""
    most = address_space() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def address_space() -> int:
    """Return the size of this process's address space, in bytes."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _deny_files_and_network(libc: ctypes.CDLL) -> None:
    """Apply Landlock without any rule that allows something: no file can be opened, made, renamed or
    removed, nothing can be executed, no TCP port can be bound or connected to, and (if the kernel supports
    that) no process outside can be sent a signal.
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
