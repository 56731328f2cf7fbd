"""Bounds how much goes on at once, and tells refused callers when it is worth trying again.

`Admission` bounds how many RPCs go on at once: in all, from each address and from each connection. An RPC
takes its place when its headers have arrived, before its message is received, and keeps it until its task
ends: the reply has left, or the client is gone. An RPC that finds no place is refused as BUSY at once; none
waits here. Each kind of RPC has places of its own, so that a server that is full of work can still be asked
for its health and told to abort.

`Receiving` bounds how long a message may take to arrive, and how many messages may be arriving for longer
than a moment. gRPC holds a message in memory until its last byte has arrived. Most messages are complete when
their call is looked at, and wait for nothing here. A message that is not complete a moment later needs a
place, of which there are few. So a client that sends the first megabytes of thousands of messages, and never
the rest, takes the memory of only a few, and does not keep others from sending theirs.

`Places` counts places in the engine's queue from the arrival of a request, before the engine has it. Between
the two the prompt is tokenized and the grammar compiled. Without counting requests in that state there could
be any number of them, and most would be refused only after that work was done.

`HeldImages` bounds the memory of the images that requests hold while they wait and run. Requests keep their
images as the patches that the model takes, which need a hundred times the bytes of a photograph's file:
hundreds of megabytes for a context full of them.

`Pace` measures how fast work gets done, and so knows when a refused caller should come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

from penstock.runtime.errors import QueueFull
from penstock.service.backend import Backend
from penstock.service.errors import Busy, StalledSender
from penstock.service.limits.bounds import Bounds
from penstock.shared.addresses import counted_address

Clock = Callable[[], float]

WINDOW_S = 30.0
"""Ends that are older than about this many seconds count for little."""
SHORTEST_S = 1.0
"""The shortest time, in seconds, that a rate is computed over."""
UNKNOWN_S = 1.0
"""Seconds to wait while no work has ended yet."""
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0


class Pace:
    """Counts what is under way and how much of it ends per second, and tells refused callers when to come
    back.

    Only time with something under way counts, because an idle night says nothing about the speed of the
    morning. Older ends weigh less, by exp(-age / WINDOW_S). Not for use on several threads.
    """

    __slots__ = ("_active", "_at", "_clock", "_ended", "_promised", "_span_s")

    def __init__(self, clock: Clock = time.monotonic) -> None:
        """`clock` gives seconds and never goes back."""
        self._clock = clock
        self._active = 0
        self._at = clock()
        self._ended = 0.0
        self._span_s = 0.0
        self._promised = self._at
        """Until this time every place that becomes free is promised to a refused caller."""

    @property
    def active(self) -> int:
        """How much is under way."""
        return self._active

    def entered(self, count: int = 1) -> None:
        """Count `count` more as under way."""
        self._advance()
        self._active += count

    def left(self, count: int = 1) -> None:
        """Count `count` of them as ended, in whichever way they ended."""
        self._advance()
        self._active -= count
        self._ended += count

    def per_second(self) -> float | None:
        """Tell how many end per second, or None if none has ended yet."""
        self._advance()
        return self._ended / max(self._span_s, SHORTEST_S) if self._ended else None

    def retry_after_s(self, places: int = 1) -> float:
        """Say in how many seconds `places` places should be free for a caller that is refused now.

        Callers that are refused one after the other get later and later times, so that they do not all come
        back for the same place. None gets a time after all work that is under way now should have ended: a
        flood of refusals must not send honest callers away for longer than that.
        """
        rate, now = self.per_second(), self._at
        if not rate:
            return UNKNOWN_S
        latest = now + max(self._active, places) / rate
        self._promised = min(max(self._promised, now) + places / rate, latest)
        return min(max(self._promised - now, MIN_RETRY_S), MAX_RETRY_S)

    def _advance(self) -> None:
        now = self._clock()
        if self._active > 0:
            kept = math.exp((self._at - now) / WINDOW_S)
            self._ended *= kept
            self._span_s = self._span_s * kept + WINDOW_S * (1 - kept)
        self._at = now


PACKAGES = ("penstock.v1.", "vllm.grpc.engine.")
"""What the names of the services begin with that need an engine; the server's stop waits for their calls."""


class Kind(enum.Enum):
    """The kinds of RPC. Each has bounds of its own."""

    WORK = "rpcs"
    TOKENIZE = "tokenize_rpcs"
    CONTROL = "control_rpcs"
    UPDATE = "update_rpcs"
    WATCH = "watch_rpcs"
    HEALTH = "health_rpcs"
    REFLECTION = "reflection_rpcs"


_WORK = frozenset({"Generate", "Stream", "Embed", "Score", "Rerank", "Classify"})
_UPDATE = frozenset({"UpdateWeights", "PushAdapter"})
_WATCH = "WatchLoad"
_GROUP = "penstock.service.group.GroupService"
_TOKENIZE = frozenset({"Tokenize", "Detokenize"})


def kind_of(method: str) -> Kind:
    """Return the kind of a method such as "penstock.v1.InferenceService/Generate"; methods of unknown
    services are work.
    """
    service, _, name = method.rpartition("/")
    if service.startswith("grpc.health."):
        return Kind.HEALTH
    if service.startswith("grpc.reflection."):
        return Kind.REFLECTION
    if name in _TOKENIZE:
        return Kind.TOKENIZE
    if name in _UPDATE:
        return Kind.UPDATE
    if name == _WATCH:
        return Kind.WATCH
    if service == _GROUP:
        return Kind.CONTROL
    return Kind.CONTROL if service.startswith(PACKAGES) and name not in _WORK else Kind.WORK


@lru_cache(maxsize=1024)
def address_of(peer: str) -> str | None:
    """Return the address that a connection is counted under, from gRPC's name of its peer, such as
    "ipv4:10.0.0.1:1234" or "ipv6:%5B::1%5D:1234".

    None for a peer without an address, such as a Unix socket, whose connections all have one name.
    """
    scheme, _, rest = urllib.parse.unquote(peer).partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return None
    return counted_address(rest.rpartition(":")[0].strip("[]"))


class Room:
    """A bounded number of places; a bound of 0 means any number."""

    __slots__ = ("most", "name", "pace")

    def __init__(self, name: str, most: int, clock: Clock) -> None:
        self.name, self.most, self.pace = name, most, Pace(clock)

    def check(self) -> None:
        """Raise Busy if there is no place."""
        if 0 < self.most <= self.pace.active:
            raise Busy(self.name, self.most, self.pace.retry_after_s())


class PeerRooms:
    """One room for each peer that has an RPC under way."""

    def __init__(self, name: str, most: int, clock: Clock) -> None:
        self._name, self._most, self._clock = name, most, clock
        self._rooms: dict[str, Room] = {}

    def of(self, peer: str | None) -> Room | None:
        """Return the peer's room, or None if the peer is not bounded."""
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
            """Make a gate of which one address may have half, so that it cannot take every place; it may
            always have one.
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
        """Tell how many RPCs of the kind are under way."""
        return self._gates[kind][0].active

    @property
    def active_work(self) -> int:
        """How many RPCs of the kind WORK, including those of TOKENIZE, are under way."""
        return self.active(Kind.WORK)

    @property
    def num_peers(self) -> int:
        """How many addresses and connections have an RPC under way."""
        return sum({gate: gate.num_peers for gates in self._gates.values() for gate in gates}.values())


T = TypeVar("T")
MOMENT_S = 0.5
"""Within this many seconds a message has arrived, unless it is large, the network is slow, or it is never
sent.
"""
_WITH_WORK = (Kind.WORK, Kind.TOKENIZE)
"""The kinds whose messages share the places of work while they arrive."""


class Receiving:
    """The places of one server. Used on its event loop only."""

    def __init__(
        self,
        most: int,
        limit_s: float,
        clock: Clock = time.monotonic,
        *,
        update_limit_s: float = 0.0,
    ) -> None:
        """`most` messages of work may take longer than a moment at once, of which one address may have half;
        the other kinds have a few places each. 0 means any number. `limit_s` is how long one message may
        take, in seconds, and `update_limit_s` how long each message of an update or a pushed adapter may; 0
        means for ever.
        """
        self._limits_s = dict.fromkeys(Kind, limit_s) | {Kind.UPDATE: update_limit_s}
        few = most and max(most // 8, 2)
        work = _receiving_gate(most, clock)
        self._gates = {kind: work if kind in _WITH_WORK else _receiving_gate(few, clock) for kind in Kind}

    def active(self, kind: Kind) -> int:
        """Tell how many messages of the kind have a place."""
        return self._gates[kind].active

    async def message(self, kind: Kind, peer: str, read: Callable[[], Awaitable[T]]) -> T:
        """Return what `read()` returns. `peer` is gRPC's name of the peer. Raises StalledSender if it takes
        too long, and Busy if too many messages do.
        """
        loop, limit_s = asyncio.get_running_loop(), self._limits_s[kind]
        refusal: Busy | None = None
        leave: Callable[[], None] | None = None

        def take_place() -> None:
            nonlocal refusal, leave
            try:
                leave = self._gates[kind].enter(peer)
            except Busy as error:
                refusal = error
                deadline.reschedule(loop.time())

        timer = loop.call_later(MOMENT_S, take_place)
        try:
            async with asyncio.timeout(limit_s or None) as deadline:
                return await read()
        except TimeoutError:
            raise refusal or StalledSender(limit_s) from None
        finally:
            timer.cancel()
            if leave is not None:
                leave()
            refusal = None  # its traceback refers to this frame


def _receiving_gate(most: int, clock: Clock) -> Gate:
    return Gate("max_receiving_rpcs", most, clock, per_address=(most + 1) // 2)


class Places:
    """The queue of one engine as its callers see it. Used on the event loop only."""

    def __init__(self, engine: Backend, clock: Clock = time.monotonic) -> None:
        self._engine = engine
        self._pace = Pace(clock)
        self._preparing = 0

    @property
    def preparing(self) -> int:
        """Outputs of requests that are being prepared for the engine."""
        return self._preparing

    @contextlib.contextmanager
    def taken(self, outputs: int) -> Iterator[None]:
        """Hold places for the outputs of one request while the context is open; at its end the engine must
        have them all.

        Raises QueueFull at once, with the time to come back, if the queue cannot take them, or inside, if the
        engine refuses them. An engine that takes no requests at all gives its own reason.
        """
        if self._engine.ready:
            load, config = self._engine.load(), self._engine.config
            rows = max(config.max_num_seqs - load.num_running, 0)
            coming = load.num_waiting + self._preparing
            # Outputs that are being prepared may still find a free row; those that wait in the engine found
            # none.
            free = config.max_queued_requests - load.num_waiting
            if outputs > free or coming + outputs > config.max_queued_requests + rows:
                raise self._refusal(outputs, config.max_queued_requests)
        self._preparing += outputs
        try:
            yield
        except QueueFull as error:
            raise self._refusal(outputs, error.limit) from None
        finally:
            self._preparing -= outputs
        self._pace.entered(outputs)

    def left(self, outputs: int) -> None:
        """Count these outputs as ended, in whichever way, so that others have room."""
        self._pace.left(outputs)

    def _refusal(self, outputs: int, limit: int) -> QueueFull:
        return QueueFull(limit, self._pace.retry_after_s(outputs))


LIMIT = "max_held_image_bytes"
"""The bound on held images, as a refusal names it."""


class HeldImages:
    """The bytes of all images that requests hold. Used on the event loop only."""

    def __init__(self, most: int, clock: Clock = time.monotonic) -> None:
        self._most = most
        self._pace = Pace(clock)

    @property
    def num_bytes(self) -> int:
        """How many bytes are held now."""
        return self._pace.active

    def hold(self, num_bytes: int) -> None:
        """Count so many bytes more, until `release`. Raises Busy if there would be too many; one request
        alone never has too many.
        """
        held = self._pace.active
        if held and num_bytes and held + num_bytes > self._most:
            raise Busy(LIMIT, self._most, self._pace.retry_after_s(num_bytes))
        if num_bytes:
            self._pace.entered(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Count these bytes no longer."""
        if num_bytes:
            self._pace.left(num_bytes)
