"""The switchboard: one wake-up of the loop for each step, however many requests the step serves."""

from __future__ import annotations

import asyncio

import pytest

from penstock.runtime.prompting import outputs
from penstock.runtime.requests.request import Finish, FinishReason, StepOutput, StoppingParams
from penstock.runtime.text.assembler import Assembler
from penstock.service.errors import StalledReader
from penstock.service.replies.outputs import (
    SLOWEST_BYTES_PER_S,
    Absence,
    Buffer,
    RequestReader,
    ServerSwitchboard,
    StallLog,
)
from penstock.service.replies.reply_budget import ReplyBudget, ReplyLimits
from tests.service.rig import CODEC, fake, until

LAST = StepOutput("", (98,), finish=Finish(FinishReason.EOS))


def reader(board, engine, *names, assembler=None, stalls=None, **options):
    """Return the reader of a request with these outputs, and their buffers."""
    budget = ReplyBudget(ReplyLimits())
    made = RequestReader(engine, names[0], budget, stalls or StallLog(), **options)
    buffers = [
        Buffer(engine, board, name, assembler or Assembler(StoppingParams(), CODEC), made) for name in names
    ]
    made.reads(buffers)
    board.holders.update(zip(names, buffers, strict=True))  # as `submit` does
    return made, buffers


async def test_one_wake_up_a_step(monkeypatch):
    """64 sinks are called from another thread, as in one step, and the loop is woken once."""
    # However slow the machine is, what came is taken in at one turn.
    monkeypatch.setattr(outputs, "MAX_TURN_S", 3600.0)
    loop = asyncio.get_running_loop()
    calls = []

    class CountingLoop:
        def call_soon_threadsafe(self, work):
            calls.append(work)

    board = ServerSwitchboard(CountingLoop())  # type: ignore[arg-type]
    made = [reader(board, fake(), str(i)) for i in range(64)]
    await loop.run_in_executor(None, lambda: [buffer.sink([LAST]) for _, (buffer,) in made])
    assert len(calls) == 1
    calls[0]()
    assert [(await one.take())[1].text for one, _ in made] == ["b"] * 64
    made[0][1][0].sink([LAST])
    assert len(calls) == 2, "the next step wakes it again"


async def test_a_long_step_is_taken_in_by_turns(monkeypatch):
    """Other tasks on the event loop have a turn in between, and nothing is lost or delivered twice."""
    monkeypatch.setattr(outputs, "MAX_TURN_S", 0.0)
    board = ServerSwitchboard(asyncio.get_running_loop())
    made = [reader(board, fake(), str(i)) for i in range(8)]
    for _, (buffer,) in made:
        buffer.sink([StepOutput("", (97,)), LAST])
    await asyncio.sleep(0)
    assert sum(buffer.can_take for _, (buffer,) in made) == 1
    made[0][1][0].sink([LAST])  # after its end: dropped
    assert [(await one.take())[1].text for one, _ in made] == ["ab"] * 8


async def test_outputs_of_a_former_user_of_an_id_do_not_reach_the_next():
    """They were on their way when the first request was cancelled and the second one took the id."""
    board = ServerSwitchboard(asyncio.get_running_loop())
    engine = fake()
    first, (buffer,) = reader(board, engine, "same")
    buffer.sink([StepOutput("same", (120,))])
    first.close()
    second, (buffer,) = reader(board, engine, "same")
    buffer.sink([LAST])
    assert (await second.take())[1].text == "b"
    assert engine.cancelled == ["same"]


async def test_a_former_user_of_an_id_does_not_end_the_next():
    """The engine had finished the first request and took the id again before the first one heard of its end.
    Neither a stop string in outputs that are still on their way nor the first one's cancel may end the
    second.
    """
    board = ServerSwitchboard(asyncio.get_running_loop())
    engine = fake()
    first, (buffer,) = reader(board, engine, "same", assembler=Assembler(StoppingParams(stop=("x",)), CODEC))
    second, _ = reader(board, engine, "same")
    buffer.deliver(StepOutput("same", (120,)))
    first.close()
    assert (engine.told, engine.cancelled) == ([], [])
    second.close()
    second.close()
    assert engine.cancelled == ["same"]
    assert not board.holders


async def test_one_cancel_for_all_outputs():
    calls = []

    class Engine:
        def cancel(self, *request_ids):
            calls.append(request_ids)

    board = ServerSwitchboard(asyncio.get_running_loop())
    one, buffers = reader(board, Engine(), "a", "b", "c")
    buffers[1].deliver(LAST)
    one.close()
    assert calls == [("a", "c")], "what has ended is not cancelled"


async def test_an_id_cannot_forge_a_line_of_the_log(caplog):
    board = ServerSwitchboard(asyncio.get_running_loop())
    one, (buffer,) = reader(board, fake(), "a\nERROR all is lost", stall_limit_s=0.001)
    buffer.deliver(StepOutput("a", (98,)))
    await until(lambda: bool(caplog.messages))
    with pytest.raises(StalledReader):
        await one.take()
    assert "\n" not in caplog.messages[0]


async def test_stalls_of_many_readers_are_few_lines(caplog):
    board = ServerSwitchboard(asyncio.get_running_loop())
    now = 100.0
    engine, stalls = fake(), StallLog(clock=lambda: now)
    for i in range(50):
        _, buffers = reader(board, engine, f"{i}", f"{i}+", stalls=stalls, stall_limit_s=0.001)
        for buffer in buffers:
            buffer.deliver(StepOutput("", (98,)))
    await until(lambda: len(engine.cancelled) == 100)
    assert len(caplog.messages) == 1
    now += 11
    stalls.tell("the last", 1.0)
    assert len(caplog.messages) == 2
    assert "and 49 more" in caplog.messages[1], "one for each reader, however many outputs it reads"


async def test_a_reader_of_several_that_stalls_after_one_is_given_up():
    """What waits in the second output has waited since before the first was taken, and nothing more comes."""
    board = ServerSwitchboard(asyncio.get_running_loop())
    both, buffers = reader(board, fake(), "a", "b", stall_limit_s=20)
    for buffer in buffers:
        buffer.deliver(LAST)
    assert (await both.take())[0] == 0
    assert (await both.take())[1].text == "b", "in time"
    assert both.is_done
    engine = fake()
    late, buffers = reader(board, engine, "c", "d", "e", stall_limit_s=0.05)
    for buffer in buffers[:2]:
        buffer.deliver(LAST)
    assert (await late.take())[0] == 0
    await until(lambda: bool(engine.cancelled))
    assert engine.cancelled == ["e"], "the end of a reader is the end of all its outputs"
    with pytest.raises(StalledReader):
        await late.take()


async def test_a_reader_that_has_taken_all_does_not_stall():
    board = ServerSwitchboard(asyncio.get_running_loop())
    one, (buffer,) = reader(board, fake(), "one", stall_limit_s=0.05)
    buffer.deliver(StepOutput("", (98,)))
    assert (await one.take())[1].text == "b"
    await asyncio.sleep(0.2)
    buffer.deliver(StepOutput("", (99,), finish=Finish(FinishReason.EOS)))
    assert (await one.take())[1].text == "c"


async def test_a_reader_that_comes_and_goes_is_given_up_only_after_the_whole_limit():
    """One timer serves all absences: it is set in the first, and looks again when it fires in a later one."""
    told: list[float] = []
    loop, given_up = asyncio.get_running_loop(), asyncio.Event()
    absence = Absence(0.2, given_up.set, lambda since_ns, seconds, gave_up: told.append(seconds))
    absence.begin(0)
    absence.end()
    await asyncio.sleep(0.1)
    began = loop.time()
    absence.begin(0)
    absence.begin(0)  # it is away already
    await asyncio.wait_for(given_up.wait(), 20)
    assert loop.time() - began >= 0.19
    assert told[0] >= 0.19
    assert len(told) == 1, "the first absence was too short for a stall"
    absence.close()


async def test_a_shorter_limit_is_not_kept_by_the_timer_of_a_longer_one():
    """A large message may take longer, so a later one may be due before an earlier one."""
    given_up = asyncio.Event()
    absence = Absence(0.05, given_up.set, lambda since_ns, seconds, gave_up: None)
    absence.begin(SLOWEST_BYTES_PER_S * 3600)
    absence.end()
    absence.begin(0)
    await asyncio.wait_for(given_up.wait(), 20)


async def test_nothing_is_given_up_after_the_end():
    given_up = asyncio.Event()
    absence = Absence(0.05, given_up.set, lambda since_ns, seconds, gave_up: None)
    absence.begin(0)
    absence.close()
    await asyncio.sleep(0.15)
    assert not given_up.is_set()


async def test_outputs_after_the_loops_end_are_dropped():
    """The engine's thread may be a step ahead of a server that has ended, and must not fail
    because of that.
    """
    loop = asyncio.new_event_loop()
    board = ServerSwitchboard(loop)
    loop.close()
    _, (buffer,) = reader(board, fake(), "late")
    buffer.sink([StepOutput("late", (98,))])


async def test_close_after_the_end_cancels_nothing():
    """Its id may belong to another request by then."""
    board = ServerSwitchboard(asyncio.get_running_loop())
    engine = fake()
    one, (buffer,) = reader(board, engine, "one")
    buffer.sink([LAST])
    await one.take()
    one.close()
    assert engine.cancelled == []
