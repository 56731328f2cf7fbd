"""What front processes and the engine's process tell each other arrives as it was sent, in fair turns."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.service.relay.link import PART_BYTES, Kind, Line, Link, Opening, Status
from tests.service.rig import WAIT_S

MIB = 2**20
NAMES = st.from_regex(r"\A[a-z0-9_.-]{1,20}\Z").filter(lambda name: not name.endswith("-bin"))
METADATA = st.lists(
    st.one_of(
        st.tuples(NAMES, st.text(max_size=50)),
        st.tuples(NAMES.map(lambda name: f"{name}-bin"), st.binary(max_size=50)),
    )
).map(tuple)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Opening,
        method=st.text(),
        peer=st.text(),
        deadline_s=st.none() | st.floats(allow_nan=False),
        metadata=METADATA,
        identity=st.dictionaries(NAMES, st.lists(st.binary(), min_size=1)),
    )
)
def test_openings_come_apart_as_they_were_packed(opening: Opening) -> None:
    assert Opening.of(opening.packed()) == opening


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Status, code=st.integers(0, 16), details=st.text(), trailing_metadata=METADATA, reply=st.binary()
    )
)
def test_statuses_come_apart_as_they_were_packed(status: Status) -> None:
    assert Status.of(status.packed()) == status


@settings(max_examples=40, deadline=None)
@given(st.builds(Line, level=st.integers(0, 50), logger=NAMES, text=st.text()))
def test_lines_come_apart_as_they_were_packed(line: Line) -> None:
    assert Line.of(line.packed()) == line


def test_a_line_that_is_no_unicode_is_told_nevertheless() -> None:
    assert Line.of(Line(20, "x", "file \udcff").packed()).text == r"file \udcff"


@dataclass
class End:
    """One end of a link, with what it received."""

    link: Link
    frames: list[tuple[int, int, bytes]] = field(default_factory=list)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    async def has(self, number: int) -> None:
        """Wait until so many frames are here."""
        async with asyncio.timeout(WAIT_S):
            while len(self.frames) < number:  # noqa: ASYNC110 -- the list has no event
                await asyncio.sleep(0.001)


async def end(connection: socket.socket) -> End:
    frames: list[tuple[int, int, bytes]] = []
    lost = asyncio.Event()
    link = Link(lambda *frame: frames.append(frame), lost.set)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=connection)
    return End(link, frames, lost)


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[End, End]]:
    one, other = [await end(connection) for connection in socket.socketpair()]
    try:
        yield one, other
    finally:
        one.link.close()
        other.link.close()
        await asyncio.wait_for(asyncio.gather(one.lost.wait(), other.lost.wait()), WAIT_S)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 200_000), max_size=12))
def test_frames_arrive_whole_whatever_their_sizes(sizes: list[int]) -> None:
    """Those that are sent whole arrive in order."""
    sent = [(Kind.MESSAGE, call, bytes([call]) * size) for call, size in enumerate(sizes, start=1)]

    async def run() -> list[tuple[int, int, bytes]]:
        async with linked() as (one, other):
            for frame in sent:
                one.link.send(*frame)
            await other.has(len(sent))
            return other.frames

    received = asyncio.run(run())
    assert sorted(received) == sorted(sent)
    assert [f for f in received if len(f[2]) <= PART_BYTES] == [f for f in sent if len(f[2]) <= PART_BYTES]


async def test_a_large_message_does_not_keep_small_ones_waiting() -> None:
    """Of two large ones neither waits for the whole of the other."""
    async with linked() as (one, other):
        one.link.send(Kind.MESSAGE, 1, b"a" * 16 * MIB)
        one.link.send(Kind.MESSAGE, 2, b"b" * MIB)
        await asyncio.sleep(0)
        for call in range(3, 103):
            one.link.send(Kind.SENT, call)
        await other.has(102)
        assert [call for _, call, _ in other.frames[-2:]] == [2, 1]
        assert other.frames[-1] == (Kind.MESSAGE, 1, b"a" * 16 * MIB)


async def test_both_ends_learn_that_the_other_is_gone() -> None:
    async with linked() as (one, other):
        one.link.send(Kind.SENT, 7)
        one.link.close()
        await asyncio.wait_for(other.lost.wait(), WAIT_S)
        assert other.frames == [(Kind.SENT, 7, b"")]
        other.link.send(Kind.SENT, 8)  # which is dropped
