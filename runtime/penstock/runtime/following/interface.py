"""What leader and followers of a group tell each other, and the options of a group. No jax.

A group is several processes that together have the devices over which one model is cut. The process with the
number 0 leads: it has scheduler and service. The others follow: they have a runner, and make the calls of the
leader's runner, which they get as a dispatch log. What a call computes depends on its arguments and on what
lies on the devices, so all processes that make the same calls in the same order stay equal.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from penstock.runtime.errors import ConfigError, GroupEnded
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.interface import Staging

DEFAULT_TIMEOUT_S = 30.0
MOST_PROCESSES = 1024
MOST_CALL_BYTES = 1 << 29
"""Bytes of the arrays of one call. Those of an image, and of an adapter on one device, are the largest;
Protocol Buffers take 2 GiB at most, and a sign of life waits behind a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Which process of which group this is. The defaults are those of a process that is alone."""

    processes: int = 1
    """How many processes the model is cut over; each has as many devices as the others."""
    process_id: int | None = None
    """The number of this process; 0 leads. It must be given if there are several."""
    coordinator: str | None = None
    """Where JAX's processes find each other: a port on the leader's machine, as HOST:PORT. It must be given
    if there are several."""
    group_timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds within which the group has ended in every process when one of them is lost, or hangs. Must
    exceed the time of two steps."""

    def __post_init__(self) -> None:
        bad: list[str] = []
        if not 1 <= self.processes <= MOST_PROCESSES:
            bad.append(f"processes: must be from 1 to {MOST_PROCESSES}, not {self.processes}")
        if not (math.isfinite(self.group_timeout_s) and 1.0 <= self.group_timeout_s <= 3600.0):
            bad.append(f"group_timeout_s: must be from 1 to 3600, not {self.group_timeout_s}")
        if self.processes > 1:
            if self.coordinator is None:
                bad.append(f"coordinator: must be given, because processes is {self.processes}")
            if self.process_id is None:
                bad.append(f"process_id: must be given, because processes is {self.processes}")
        elif self.coordinator is not None:
            bad.append("coordinator: needs processes, of which there is 1")
        if self.coordinator is not None and not _is_address(self.coordinator):
            bad.append(f"coordinator: must be HOST:PORT, not {self.coordinator!r}")
        if self.process_id is not None and not 0 <= self.process_id < self.processes:
            bad.append(f"process_id: must be from 0 to {self.processes - 1}, not {self.process_id}")
        if bad:
            raise ConfigError("; ".join(bad))

    @property
    def is_group(self) -> bool:
        """Whether there are several processes."""
        return self.processes > 1

    @property
    def leads(self) -> bool:
        """Whether this process is the leader of a group."""
        return self.is_group and self.process_id == 0

    @property
    def silence_s(self) -> float:
        """Seconds after which a process that says nothing is lost. The rest of the timeout is for the end."""
        return self.group_timeout_s / 2


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


class Kind(enum.Enum):
    """What a call does. The first ones call a program, and the others change what lies on the devices."""

    FORWARD = "forward"
    FORWARD_PROPOSED = "forward_proposed"
    GUESS = "guess"
    WINDOW = "window"
    CHOOSE = "choose"
    PROMPT_LOGPROBS = "prompt_logprobs"
    HIDDEN_SUMS = "hidden_sums"
    ADMIT = "admit"
    TABLE_ROWS = "table_rows"
    COPY_PAGES = "copy_pages"
    ENCODE = "encode"
    WRITE_ADAPTER = "write_adapter"
    FREE_KV_CACHE = "free_kv_cache"
    RESTORE_KV_CACHE = "restore_kv_cache"
    OFFLOAD_WEIGHTS = "offload_weights"
    RESTORE_WEIGHTS = "restore_weights"
    INSTALL_WEIGHTS = "install_weights"


class Call(NamedTuple):
    """What the leader's runner does to its devices in one call, for others to do the same."""

    kind: Kind
    program: str = ""
    """Which of several programs it calls: the name of a `ProgramKey`, the number of patches of ENCODE, that
    of the rows of GUESS, or that of the update of INSTALL_WEIGHTS, or CHECKED for a choice where tokens are
    proposed. For WRITE_ADAPTER the digest of the adapter.
    """
    arrays: tuple[NDArray[Any], ...] = ()
    """The arguments besides what lies on the devices."""


CHECKED = "checked"
"""The program of a CHOOSE that also takes checks, as its second array."""


class UpdateBegin(NamedTuple):
    """A weight update, of which each follower makes what its own devices have."""

    number: int
    tensors: tuple[SentTensor, ...]
    """Those that the model reads, without checksums."""
    staging: Staging
    uri: str = ""
    """The files that each process reads itself; empty: pieces come."""


class Piece(NamedTuple):
    """The values of the next region of a tensor (`regions`). Its pieces follow each other; a tensor of which
    a follower needs nothing has an empty one.
    """

    number: int
    tensor_index: int
    data: bytes | memoryview


class UpdateEnd(NamedTuple):
    """All tensors of an update have come."""

    number: int


class UpdateOver(NamedTuple):
    """An update serves, or is given up: what it has made and replaced is let go."""

    number: int


UpdateRecord = UpdateBegin | Piece | UpdateEnd | UpdateOver
"""What followers are told of an update besides the call INSTALL_WEIGHTS."""


class Taken(NamedTuple):
    """A follower has taken pieces of so many bytes."""

    num_bytes: int


class Prepared(NamedTuple):
    """What came of an update's tensors in a follower."""

    number: int
    digest: bytes = b""
    """See `digest_of`. The bytes of a tensor are here those that the follower got."""
    too_large: Mapping[str, str] = {}
    """Tensors with values beyond the range of a dtype, and the dtype."""
    problem: str = ""
    """Why the update cannot be made there; empty: it can."""


Facts = Mapping[str, str]
"""Name to value of what must be equal in all processes of a group."""


class DispatchLog(Protocol):
    """Takes what the leader's runner does, and brings it to the followers. GroupEnded is raised by every
    method once the group has ended.
    """

    def meet(self, facts: Facts) -> None:
        """Wait until all followers are there, before anything is loaded. ConfigError, which names each
        difference, if the facts of one are others.
        """
        ...

    def begin(self, facts: Facts) -> None:
        """Wait until all followers have compiled their programs. ConfigError as `meet`."""
        ...

    def append(self, call: Call) -> None:
        """Hand over the next call. Waits only where far too much waits already."""
        ...

    # -- weight updates, on any thread --

    def open_update(self) -> int:
        """Begin an update and return its number; it begins with `tell` and ends with `close_update`."""
        ...

    def tell(self, record: UpdateRecord, process_id: int | None = None) -> None:
        """Send a part of an update to the follower with this number; None: to all. Waits while one of these
        has too many bytes to take. Raises WeightsError if a follower cannot make the update, or if it was
        given up.
        """
        ...

    def prepared(self, number: int) -> Mapping[int, Prepared]:
        """Wait until all followers have prepared the update, and return what came of it by their numbers.
        Raises as `tell`.
        """
        ...

    def give_up_update(self, number: int) -> None:
        """Let `tell` and `prepared` raise WeightsError from now on, if the update has begun and is not
        closed.
        """
        ...

    def close_update(self, number: int) -> None:
        """Tell followers, if they know of it, that the update is over. Raises nothing."""
        ...

    # -- the end --

    def explained(self, error: Exception) -> GroupEnded:
        """Return the end of the group that is behind an error of the device."""
        ...


class Lead(NamedTuple):
    """What makes an engine the leader of a group."""

    options: GroupOptions
    log: DispatchLog


class LeaderLink(Protocol):
    """A follower's side of a dispatch log. GroupEnded is raised by every method once the group has ended."""

    def meet(self, facts: Facts) -> None:
        """See `DispatchLog`. ConfigError, which names each difference, if the leader's facts are others."""
        ...

    def begin(self, facts: Facts) -> None:
        """Say that the programs are compiled. ConfigError as `meet`."""
        ...

    def calls(self) -> Iterator[Call | UpdateRecord]:
        """Yield the leader's calls and what it tells of updates, in order. They end when the leader has
        stopped.
        """
        ...

    def report(self, report: Taken | Prepared) -> None:
        """Tell the leader of an update. Any thread may call this. Waits for nobody."""
        ...


def differences(ours: Facts, theirs: Facts) -> list[str]:
    """Name the facts that are not equal, each with both values."""
    absent = "absent"
    return [
        f"{name} is {theirs.get(name, absent)}, and the leader's {ours.get(name, absent)}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
