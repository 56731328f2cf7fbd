"""LoadFeed alone: what is shared, and what a slow watcher gets. The test says when a snapshot is taken."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from penstock.runtime.errors import Draining
from penstock.service.lifecycle.underway import Calls
from penstock.service.requests.control import Watch
from penstock.service.watching.feed import LoadFeed
from penstock.service.watching.snapshot import Snapshot
from tests.service.rig import WAIT_S, until

REQUESTS = [b"x", b"y", b"z"]


class Looks:
    """Takes snapshots whose message begins with how many were taken."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        """The most requests of each snapshot."""
        self.may_end = threading.Event()
        self.may_end.set()
        self.error: Exception | None = None

    def __call__(self, max_requests: int) -> Snapshot:
        self.asked.append(max_requests)
        number = len(self.asked)
        assert self.may_end.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return Snapshot(b"%d" % number, REQUESTS[:max_requests])


def feed_of(looks: Looks, calls: Calls | None = None) -> LoadFeed:
    return LoadFeed(looks, calls or Calls())


def soon(messages: AsyncIterator[bytes]) -> asyncio.Task[bytes]:
    """Wait for the next message beside the test."""

    async def get() -> bytes:
        return await asyncio.wait_for(anext(messages), WAIT_S)

    return asyncio.create_task(get())


async def test_a_slow_watcher_gets_what_is_new_and_nothing_that_it_missed() -> None:
    """Three intervals pass while it does something else. No snapshot was taken for it meanwhile."""
    looks = Looks()
    messages = feed_of(looks).messages(Watch(0.1, 0))
    assert await soon(messages) == b"1"
    await asyncio.sleep(0.35)
    assert looks.asked == [0]
    assert await soon(messages) == b"2"
    assert looks.asked == [0, 0]


async def test_watchers_that_come_while_a_snapshot_is_taken_share_it() -> None:
    looks = Looks()
    feed = feed_of(looks)
    looks.may_end.clear()
    watches = [feed.messages(Watch(60, 0)) for _ in range(5)]
    waiting = [soon(messages) for messages in watches[:3]]
    await until(lambda: len(looks.asked) == 1)
    await asyncio.sleep(0.2)  # longer than a snapshot is fresh, so whoever comes now gets the next one
    waiting += [soon(messages) for messages in watches[3:]]
    await asyncio.sleep(0.05)
    looks.may_end.set()
    assert await asyncio.gather(*waiting) == [b"1"] * 3 + [b"2"] * 2
    assert looks.asked == [0, 0]


async def test_whoever_wants_more_requests_waits_for_the_next_snapshot_which_has_enough_for_all() -> None:
    looks = Looks()
    feed = feed_of(looks)
    looks.may_end.clear()
    few, many, more = (feed.messages(Watch(60, wanted)) for wanted in (1, 3, 2))
    first = soon(few)
    await until(lambda: len(looks.asked) == 1)
    others = [soon(many), soon(more)]
    await asyncio.sleep(0.05)
    looks.may_end.set()
    assert await first == b"1x"
    assert await asyncio.gather(*others) == [b"2xyz", b"2xy"]
    assert looks.asked == [1, 3]


async def test_nobody_watches_nothing_is_taken() -> None:
    looks = Looks()
    feed = feed_of(looks)
    messages = feed.messages(Watch(0.1, 2))
    await soon(messages)
    assert feed.num_watchers == 1
    await messages.aclose()  # type: ignore[attr-defined]  # it is a generator
    assert feed.num_watchers == 0
    await asyncio.sleep(0.3)
    assert looks.asked == [2]
    # whoever comes later is not given the requests that the one before wanted
    assert await soon(feed.messages(Watch(0.1, 0))) == b"2"
    assert looks.asked == [2, 0]


async def test_one_watcher_that_goes_does_not_take_the_snapshot_from_the_others() -> None:
    looks = Looks()
    feed = feed_of(looks)
    looks.may_end.clear()
    leaving, staying = (soon(feed.messages(Watch(60, 0))) for _ in range(2))
    await until(lambda: len(looks.asked) == 1)
    leaving.cancel()
    looks.may_end.set()
    assert await staying == b"1"
    assert leaving.cancelled()


async def test_a_snapshot_that_fails_fails_for_those_who_waited() -> None:
    looks = Looks()
    feed = feed_of(looks)
    looks.error = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        await soon(feed.messages(Watch(60, 0)))
    looks.error = None
    await asyncio.sleep(0.1)
    assert await soon(feed.messages(Watch(60, 0))) == b"2"


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_drain_ends_the_watch_wherever_it_waits(hangs: bool) -> None:
    looks, calls = Looks(), Calls()
    messages = feed_of(looks, calls).messages(Watch(60, 0))
    if hangs:
        looks.may_end.clear()
    else:
        await soon(messages)
    waiting = soon(messages)
    await until(lambda: len(looks.asked) == 1)
    await asyncio.sleep(0.05)
    calls.drain()
    with pytest.raises(Draining):
        await waiting
    looks.may_end.set()
