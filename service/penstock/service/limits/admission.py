"""Bounds how many RPCs go on at once: in all, from each address and from each connection.

An RPC takes its place when its headers have arrived, before its message is received, and keeps it until its
task ends: the reply has left, or the client is gone. An RPC that finds no place is refused as BUSY at once;
none waits here. Each kind of RPC has places of its own, so that a server that is full of work can still be
asked for its health and told to abort.
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import time
import urllib.parse
from collections.abc import Callable, Sequence
from functools import lru_cache

from penstock.service.errors import Busy
from penstock.service.limits.bounds import Bounds
from penstock.service.limits.pace import Pace

PACKAGES = ("penstock.v1.", "vllm.grpc.engine.")
"""What the names of the services begin with that need an engine; the server's stop waits for their calls."""
Clock = Callable[[], float]


class Kind(enum.Enum):
    """The kinds of RPC. Each has bounds of its own."""

    WORK = "rpcs"
    TOKENIZE = "tokenize_rpcs"
    CONTROL = "control_rpcs"
    UPDATE = "update_rpcs"
    WATCH = "watch_rpcs"
    HEALTH = "health_rpcs"
    REFLECTION = "reflection_rpcs"


_WORK = frozenset({"Generate", "Stream", "Embed", "Score"})
_UPDATE = "UpdateWeights"
_WATCH = "WatchLoad"
_TOKENIZE = frozenset({"Tokenize", "Detokenize"})


def kind_of(method: str) -> Kind:
    """The kind of a method such as "penstock.v1.InferenceService/Generate"; methods of unknown services are
    work.
    """
    service, _, name = method.rpartition("/")
    if service.startswith("grpc.health."):
        return Kind.HEALTH
    if service.startswith("grpc.reflection."):
        return Kind.REFLECTION
    if name in _TOKENIZE:
        return Kind.TOKENIZE
    if name == _UPDATE:
        return Kind.UPDATE
    if name == _WATCH:
        return Kind.WATCH
    return Kind.CONTROL if service.startswith(PACKAGES) and name not in _WORK else Kind.WORK


@lru_cache(maxsize=1024)
def address_of(peer: str) -> str | None:
    """The address that a connection is counted under, from gRPC's name of its peer, such as
    "ipv4:10.0.0.1:1234" or "ipv6:%5B::1%5D:1234".

    It is the IPv4 address, or the IPv6 network of 64 bits, because one host may have all addresses of such a
    network. None for a peer without an address, such as a Unix socket, whose connections all have one name.
    """
    scheme, _, rest = urllib.parse.unquote(peer).partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return None
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


class Room:
    """A bounded number of places; a bound of 0 means any number."""

    __slots__ = ("most", "name", "pace")

    def __init__(self, name: str, most: int, clock: Clock) -> None:
        self.name, self.most, self.pace = name, most, Pace(clock)

    def check(self) -> None:
        """Raises Busy if there is no place."""
        if 0 < self.most <= self.pace.active:
            raise Busy(self.name, self.most, self.pace.retry_after_s())


class PeerRooms:
    """One room for each peer that has an RPC under way."""

    def __init__(self, name: str, most: int, clock: Clock) -> None:
        self._name, self._most, self._clock = name, most, clock
        self._rooms: dict[str, Room] = {}

    def of(self, peer: str | None) -> Room | None:
        """The peer's room, or None if the peer is not bounded."""
        if not self._most or peer is None:
            return None
        return self._rooms.get(peer) or Room(self._name, self._most, self._clock)

    def keep(self, peer: str, room: Room) -> None:
        """Remember the room, because it is in use now."""
        self._rooms[peer] = room

    def drop_if_empty(self, peer: str, room: Room) -> None:
        """Forget the room of a peer that has nothing under way any more, so that peers that went take no
        memory.
        """
        if not room.pace.active:
            self._rooms.pop(peer, None)

    def __len__(self) -> int:
        return len(self._rooms)


class Gate:
    """The places of one kind of RPC: in all, for each address and for each connection."""

    def __init__(
        self, name: str, most: int, clock: Clock, *, per_address: int, per_connection: int = 0
    ) -> None:
        self._all = Room(name, most, clock)
        self._addresses = PeerRooms(f"{name}_per_address", per_address, clock)
        self._connections = PeerRooms(f"{name}_per_connection", per_connection, clock)

    @property
    def active(self) -> int:
        """How many RPCs have a place now."""
        return self._all.pace.active

    @property
    def num_peers(self) -> int:
        """How many addresses and connections have a place now."""
        return len(self._addresses) + len(self._connections)

    def enter(self, peer: str) -> Callable[[], None]:
        """Take a place and return the function that gives it back, to be called once. Raises Busy."""
        address = address_of(peer)
        connection = None if address is None else peer
        taken = [
            (peers, key, room)
            for peers, key in ((self._connections, connection), (self._addresses, address))
            if (room := peers.of(key)) is not None and key is not None
        ]
        for _, _, room in taken:  # the narrowest bound first: its error says best which peer has too many
            room.check()
        self._all.check()
        self._all.pace.entered()
        for peers, key, room in taken:
            room.pace.entered()
            peers.keep(key, room)

        def leave() -> None:
            self._all.pace.left()
            for peers, key, room in taken:
                room.pace.left()
                peers.drop_if_empty(key, room)

        return leave


class Admission:
    """All gates of one server. Used on the event loop only."""

    def __init__(self, bounds: Bounds, clock: Clock = time.monotonic) -> None:
        def small(kind: Kind, most: int) -> Gate:
            """A gate of which one address may have half, so that it cannot take every place; it may always
            have one.
            """
            return Gate(f"max_{kind.value}", most, clock, per_address=(most + 1) // 2)

        work = Gate(
            "max_rpcs",
            bounds.max_rpcs,
            clock,
            per_address=bounds.max_rpcs_per_address,
            per_connection=bounds.max_rpcs_per_connection,
        )
        tokenize = small(Kind.TOKENIZE, bounds.max_tokenize_rpcs)
        self._gates: dict[Kind, Sequence[Gate]] = {
            Kind.WORK: (work,),
            Kind.TOKENIZE: (tokenize, work),
            Kind.CONTROL: (small(Kind.CONTROL, bounds.max_control_rpcs),),
            Kind.UPDATE: (small(Kind.UPDATE, bounds.max_update_rpcs),),
            Kind.WATCH: (small(Kind.WATCH, bounds.max_watch_rpcs),),
            Kind.HEALTH: (small(Kind.HEALTH, bounds.max_health_rpcs),),
            Kind.REFLECTION: (small(Kind.REFLECTION, bounds.max_reflection_rpcs),),
        }

    def enter(self, kind: Kind, peer: str) -> Callable[[], None]:
        """Take the places that an RPC needs and return the function that gives them back, to be called once.
        Raises Busy. `peer` is gRPC's name of the other end of the connection.
        """
        with contextlib.ExitStack() as taken:
            for gate in self._gates[kind]:
                taken.callback(gate.enter(peer))
            return taken.pop_all().close

    def active(self, kind: Kind) -> int:
        """How many RPCs of the kind are under way."""
        return self._gates[kind][0].active

    @property
    def active_work(self) -> int:
        """How many RPCs of the kind WORK, including those of TOKENIZE, are under way."""
        return self.active(Kind.WORK)

    @property
    def num_peers(self) -> int:
        """How many addresses and connections have an RPC under way."""
        return sum({gate: gate.num_peers for gates in self._gates.values() for gate in gates}.values())
