"""The switchboard: one wake-up of the loop however many requests a step serves."""

from __future__ import annotations

import asyncio

import pytest

from penstock.runtime.assemble import Assembler
from penstock.runtime.request import Finish, FinishReason, Output, SamplingParams, StoppingParams
from penstock.service.convert import Job, ResponseOptions, TokenPrompt
from penstock.service.errors import StalledReader
from penstock.service.streams import Buffer, Switchboard, take_any
from tests.service.rig import CODEC, fake


def buffer(board, engine, name, assembler=None, **options):
    job = Job(name, TokenPrompt((97,)), SamplingParams(), StoppingParams(), None, ResponseOptions())
    made = Buffer(engine, board, name, assembler or Assembler(job.stopping, CODEC), **options)
    board.holders[name] = made  # as `submit` does
    return made


async def test_one_wake_up_a_step():
    """64 sinks are called from another thread, as by one step; the loop is woken once."""
    loop = asyncio.get_running_loop()
    calls = []

    class CountingLoop:
        def call_soon_threadsafe(self, work):
            calls.append(work)

    board = Switchboard(CountingLoop())  # type: ignore[arg-type]
    buffers = [buffer(board, fake(), str(i)) for i in range(64)]
    last = Output("", (98,), finish=Finish(FinishReason.EOS))
    await loop.run_in_executor(None, lambda: [b.sink([last]) for b in buffers])
    assert len(calls) == 1
    calls[0]()
    assert [(await b.take()).text for b in buffers] == ["b"] * 64
    buffers[0].sink([last])
    assert len(calls) == 2, "the next step wakes it again"


async def test_outputs_of_a_former_user_of_an_id_do_not_reach_the_next():
    """They were on their way when the first was cancelled and the second took the id."""
    board = Switchboard(asyncio.get_running_loop())
    engine = fake()
    first = buffer(board, engine, "same")
    first.sink([Output("same", (120,))])
    first.close()
    second = buffer(board, engine, "same")
    second.sink([Output("same", (98,), finish=Finish(FinishReason.EOS))])
    assert (await second.take()).text == "b"
    assert engine.cancelled == ["same"]


async def test_a_former_user_of_an_id_does_not_end_the_next():
    """The engine was done with the first, so it took the id again, before the first heard of its end: neither
    the stop string the first finds in what is still on its way nor its cancel may hit the second.
    """
    board = Switchboard(asyncio.get_running_loop())
    engine = fake()
    first = buffer(board, engine, "same", Assembler(StoppingParams(stop=("x",)), CODEC))
    second = buffer(board, engine, "same")
    first.deliver(Output("same", (120,)))
    first.close()
    assert (engine.told, engine.cancelled) == ([], [])
    second.close()
    second.close()
    assert engine.cancelled == ["same"]
    assert not board.holders


async def test_an_id_cannot_forge_a_line_of_the_log(caplog):
    board = Switchboard(asyncio.get_running_loop())
    one = buffer(board, fake(), "a\nERROR all is lost", stall_limit_s=0.001)
    one.deliver(Output("a", (98,)))
    await asyncio.sleep(0.05)
    with pytest.raises(StalledReader):
        await one.take()
    assert "\n" not in caplog.messages[0]


async def test_a_reader_of_several_that_stalls_after_one_is_given_up():
    """What waits in the second has waited since before the first was taken, and nothing more comes."""
    board = Switchboard(asyncio.get_running_loop())
    changed = asyncio.Event()
    both = [buffer(board, fake(), name, stall_limit_s=0.05, changed=changed) for name in "ab"]
    for one in both:
        one.deliver(Output("", (98,), finish=Finish(FinishReason.EOS)))
    assert (await take_any(both))[0] == 0
    assert (await take_any(both[1:]))[1].text == "b", "in time"
    both[1].close()
    late = [buffer(board, fake(), name, stall_limit_s=0.05, changed=changed) for name in "cd"]
    for one in late:
        one.deliver(Output("", (98,), finish=Finish(FinishReason.EOS)))
    assert (await take_any(late))[0] == 0
    await asyncio.sleep(0.3)
    with pytest.raises(StalledReader):
        await take_any(late[1:])


async def test_a_reader_that_has_taken_all_does_not_stall():
    board = Switchboard(asyncio.get_running_loop())
    one = buffer(board, fake(), "one", stall_limit_s=0.05)
    one.deliver(Output("", (98,)))
    assert (await one.take()).text == "b"
    await asyncio.sleep(0.2)
    one.deliver(Output("", (99,), finish=Finish(FinishReason.EOS)))
    assert (await one.take()).text == "c"


async def test_outputs_after_the_loops_end_are_dropped():
    """The engine's thread may be a step ahead of a server that has ended; it must not fail for that."""
    loop = asyncio.new_event_loop()
    board = Switchboard(loop)
    loop.close()
    buffer(board, fake(), "late").sink([Output("late", (98,))])


async def test_close_after_the_end_cancels_nothing():
    """Its id may belong to another request by then."""
    board = Switchboard(asyncio.get_running_loop())
    engine = fake()
    one = buffer(board, engine, "one")
    one.sink([Output("one", (98,), finish=Finish(FinishReason.EOS))])
    await one.take()
    one.close()
    assert engine.cancelled == []
