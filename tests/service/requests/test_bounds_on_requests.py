"""What one request may hold: too much of anything is refused by its length, before anything walks over it;
and work that takes long is done where nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from penstock.runtime.chat import json_object
from penstock.runtime.chat.json_object import MAX_JSON_CHARS
from penstock.runtime.errors import InvalidRequest
from penstock.runtime.grammar.bad_words import MAX_BAD_WORDS
from penstock.runtime.prompting.prompts import most_cut_chars, most_cut_tokens
from penstock.runtime.requests.grammar import MAX_CHOICES
from penstock.runtime.requests.request import MAX_STOP_STRINGS
from penstock.service.errors import Busy
from penstock.service.requests import generate as generate_module
from penstock.service.requests.generate import (
    IDS_AT_ONCE,
    MAX_CALLS,
    MAX_TOOLS,
    MAX_TURNS,
    MAX_VIOLATIONS,
    to_job,
)
from penstock.service.servicers import inference
from penstock.service.servicers.serving import MAX_ABORT_IDS, limits_of, to_target
from penstock.service.threads.lanes import INLINE_BYTES, Lane
from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.codecs import byte_codec
from tests.service.rig import failure_of, fake, generate, serving, until
from tests.support.models.byte_text import VOCAB

LEFT = {"truncation": types_pb2.TRUNCATION_LEFT}
ROOM = 64


class Untouchable:
    """A repeated field with this many elements, none of which may be looked at."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Any:
        raise AssertionError("it was walked over")

    def __getitem__(self, at: Any) -> Any:
        raise AssertionError("it was looked into")


class With:
    """A message in which some fields are replaced."""

    def __init__(self, message: Any, **fields: Any) -> None:
        self._message, self._fields = message, fields

    def __getattr__(self, name: str) -> Any:
        return self._fields[name] if name in self._fields else getattr(self._message, name)


def nested(message: Any, path: str, value: Any) -> Any:
    """Return the message with `value` in the field at `path`."""
    name, _, rest = path.partition(".")
    return With(message, **{name: nested(getattr(message, name), rest, value) if rest else value})


A = generate("a")
CHAT = generate(chat={"messages": [types_pb2.ChatMessage(role="user")]})
CHOICE = generate("a", constraint={"choice": types_pb2.ChoiceList(choices=["a"])})
CUT_IDS = generate(prompt_token_ids={"ids": [1]}, context=LEFT)


@pytest.mark.parametrize(
    ("message", "path", "most", "field"),
    [
        (A, "sampling.bad_words", MAX_BAD_WORDS, "sampling.bad_words"),
        (A, "sampling.logit_bias", VOCAB, "sampling.logit_bias"),
        (A, "sampling.allowed_token_ids", VOCAB, "sampling.allowed_token_ids"),
        (A, "stopping.stop", MAX_STOP_STRINGS, "stopping.stop"),
        (A, "stopping.stop_token_ids", 31, "stopping.stop_token_ids"),
        (CUT_IDS, "prompt_token_ids.ids", most_cut_tokens(ROOM), "prompt_token_ids.ids"),
        (CHAT, "chat.messages", MAX_TURNS, "chat.messages"),
        (CHAT, "chat.tools", MAX_TOOLS, "chat.tools"),
        (CHOICE, "constraint.choice.choices", MAX_CHOICES, "constraint.choice"),
    ],
)
def test_too_many_are_refused_by_their_number_alone(message, path, most, field):
    request = nested(message, path, Untouchable(most + 1))
    with pytest.raises(InvalidRequest) as caught:
        to_job(request, limits_of(fake(max_model_len=ROOM)))
    (violation,) = caught.value.violations
    assert violation.field == field
    assert f"at most {most}" in violation.description
    assert violation.description.endswith(f"not {most + 1}")


def test_too_many_ids_to_abort_are_refused_by_their_number_alone():
    request = inference_pb2.AbortRequest(request_ids=inference_pb2.RequestIds(ids=["a"]))
    with pytest.raises(InvalidRequest, match=r"request_ids\.ids: at most 10000 ids, not 10001"):
        to_target(nested(request, "request_ids.ids", Untouchable(MAX_ABORT_IDS + 1)))


async def test_the_rows_of_the_review_are_refused_by_field():
    """Each of these once kept everybody waiting for 0.3 to 4 s, and some were refused in the end."""
    context = {"context": LEFT}
    lists = '{"a": [' + "[]," * 400_000 + "[]]}"
    rows: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "a", "sampling": {"bad_words": [""] * 100_000}}, "sampling.bad_words"),
        (
            {"prompt": "a", "sampling": {"logit_bias": dict.fromkeys(range(VOCAB, 100_000), 1.0)}},
            "sampling.logit_bias",
        ),
        ({"prompt": "a", "sampling": {"allowed_token_ids": [1] * 500_000}}, "sampling.allowed_token_ids"),
        ({"prompt_token_ids": {"ids": [1] * 500_000}, **context}, "prompt_token_ids.ids"),
        ({"prompt": "a" * (most_cut_chars(ROOM) + 1), **context}, "prompt"),
        (
            {"chat": {"messages": [types_pb2.ChatMessage(role="user")], "template_options_json": lists}},
            "chat.template_options_json",
        ),
    ]
    async with serving(fake(max_model_len=ROOM)) as rig:
        for fields, field in rows:
            failure = await failure_of(rig.inference.Generate(generate(**fields)))
            assert (failure.code.name, list(failure.violations)) == ("INVALID_ARGUMENT", [field])
        assert not rig.engine.seen
        detokenize = control_pb2.DetokenizeRequest(token_ids=[1] * (ROOM + 1))
        failure = await failure_of(rig.control.Detokenize(detokenize))
        assert failure.violations == {"token_ids": f"at most {ROOM} ids, not {ROOM + 1}"}


async def test_as_much_as_there_may_be_is_taken():
    calls = [types_pb2.ToolCall(id=str(i), name="f", arguments_json="{}") for i in range(MAX_CALLS)]
    tools = [types_pb2.ToolDefinition(name=f"t{i}") for i in range(MAX_TOOLS)]
    turns = [types_pb2.ChatMessage(role="user"), types_pb2.ChatMessage(role="assistant", tool_calls=calls)]
    many = types_pb2.ChatPrompt(messages=turns, tools=tools)
    async with serving(fake(max_model_len=ROOM)) as rig:
        for request in (
            generate(prompt_token_ids={"ids": [97] * most_cut_tokens(ROOM)}, context=LEFT),
            generate("a" * most_cut_chars(ROOM), context=LEFT),
            generate(
                "a", sampling={"allowed_token_ids": [*range(VOCAB)], "bad_words": ["x"] * MAX_BAD_WORDS}
            ),
            generate("a", sampling={"logit_bias": dict.fromkeys(range(VOCAB), 1.0)}),
            generate(chat=many, context=LEFT),
        ):
            await rig.inference.Generate(request)
        assert len(rig.engine.seen) == 5
        assert dict(rig.engine.seen[3].sampling.logit_bias) == dict.fromkeys(range(VOCAB), 1.0)
        turns[1].tool_calls.append(calls[0])
        refused = generate(chat=types_pb2.ChatPrompt(messages=turns))
        failure = await failure_of(rig.inference.Generate(refused))
        assert list(failure.violations) == ["chat.messages[1].tool_calls"]


async def test_of_many_violations_the_first_are_told_and_the_others_counted():
    ids = [1] * 30_000 + [VOCAB] * 40_000 + [1] * 10_000
    async with serving(fake(max_model_len=10**6)) as rig:
        failure = await failure_of(rig.inference.Generate(generate(prompt_token_ids={"ids": ids})))
    told = [f"prompt_token_ids.ids[{i}]" for i in range(30_000, 30_000 + MAX_VIOLATIONS)]
    assert list(failure.violations) == [*told, ""]
    assert failure.violations[""] == f"and {40_000 - MAX_VIOLATIONS} more violations"


def test_ids_are_looked_at_in_parts():
    """While one part is copied no other thread runs."""
    parts: list[slice] = []

    class Noted(list[int]):
        def __iter__(self):
            raise AssertionError("all at once")

        def __getitem__(self, at):
            parts.append(at)
            return list.__getitem__(self, at)

    bad = generate_module.Violations()
    ids = [3] * (2 * IDS_AT_ONCE + 5)
    assert generate_module.token_ids("x", Noted(ids), 4, bad) == tuple(ids)
    assert [part.stop - part.start for part in parts] == [IDS_AT_ONCE] * 3
    bad.raise_if_any()


# -- JSON --


@pytest.mark.parametrize("field", ["template_options_json", "tools"])
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"a": "' + "x" * MAX_JSON_CHARS + '"}', "must have at most 1048576 characters"),
        ('{"a": [' + "[]," * json_object.MAX_JSON_VALUES + "[]]}", "more than 50000 values"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "nested too deeply"),
    ],
)
async def test_json_is_bounded_before_it_is_read(monkeypatch, field, text, complaint):
    def loads(text, **_):
        assert len(text) < 100, "it was read"
        return json.loads(text)

    monkeypatch.setattr(json_object, "json", type("Json", (), {"loads": staticmethod(loads)}))
    tool = types_pb2.ToolDefinition(name="f", parameters_json=text if field == "tools" else "{}")
    chat = types_pb2.ChatPrompt(
        messages=[types_pb2.ChatMessage(role="user", content="hi")],
        tools=[tool],
        template_options_json=text if field == "template_options_json" else "{}",
    )
    async with serving() as rig:
        failure = await failure_of(rig.inference.Generate(generate(chat=chat)))
    ((at, described),) = failure.violations.items()
    assert at.startswith("chat.")
    assert field in at
    assert complaint in described


# -- where the work is done --


async def test_large_messages_are_worked_on_in_threads_and_small_ones_at_once(monkeypatch):
    """Decoding, conversion and preparing. For a small message a hop to a thread would cost more than all
    that.
    """
    on_loop: dict[str, list[bool]] = {"decode": [], "to_job": [], "prepare": []}

    def noted(name, work):
        def run(*arguments):
            on_loop[name].append(threading.current_thread() is threading.main_thread())
            return work(*arguments)

        return run

    engine = fake(max_model_len=10**5)
    engine.prepare = noted("prepare", engine.prepare)  # type: ignore[method-assign]
    monkeypatch.setattr("penstock.service.rpcs.interceptors.decode", noted("decode", decode_of()))
    monkeypatch.setattr(inference, "to_job", noted("to_job", to_job))
    short = types_pb2.ChatMessage(role="user", content="a")
    async with serving(engine) as rig:
        for request in (
            generate("a" * 50, sampling={"n": 3}),
            generate(prompt_token_ids={"ids": [97] * (INLINE_BYTES + 1)}),
            generate("a", sampling={"logit_bias": dict.fromkeys(range(VOCAB), 1.0)}),
            generate(chat={"messages": [short] * 100}),  # 700 bytes, but many turns
        ):
            await rig.inference.Generate(request)
    assert on_loop == {
        "decode": [True, False, True, True],
        "to_job": [True, False, True, False],
        "prepare": [True, False, False, True],
    }


def decode_of():
    from penstock.service.rpcs import interceptors  # noqa: PLC0415 -- as it is before it is replaced

    return interceptors.decode


async def test_more_than_may_be_converted_at_once_is_refused(monkeypatch):
    """The error is typed and names the bound; small requests pass."""
    gate, entered = threading.Event(), threading.Semaphore(0)

    def held(request, limits):
        if request.priority == 1:
            entered.release()
            assert gate.wait(30)
        return to_job(request, limits)

    monkeypatch.setattr(inference, "to_job", held)
    size = 200_000
    large = generate(prompt_token_ids={"ids": [97] * size}, priority=1)
    async with serving(fake(max_model_len=10**6, scheduling_policy="priority")) as rig:
        rig.serving.lanes.by_name["convert"].most = 2 * size
        first = asyncio.ensure_future(rig.inference.Generate(large))
        await until(lambda: entered.acquire(blocking=False))
        try:
            other = generate(prompt_token_ids={"ids": [97] * 2 * size})
            failure = await failure_of(rig.inference.Generate(other))
            assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "BUSY")
            assert dict(failure.info.metadata) == {"limit": "convert", "max": str(2 * size)}
            small = await rig.inference.Generate(generate("y"))
            assert small.outputs[0].text == "z"
        finally:
            gate.set()
        await asyncio.wait_for(first, 20)
        assert await rig.inference.Generate(other), "there is room again"


async def test_more_text_than_may_be_tokenized_at_once_is_refused():
    codec = byte_codec()
    engine = fake(max_model_len=9000, codec=codec)
    gate, entered = threading.Event(), threading.Semaphore(0)
    encode = codec.encode

    def held(text, **options):
        if text.startswith("a"):
            entered.release()
            assert gate.wait(30)
        return encode(text, **options)

    codec.encode = held  # type: ignore[method-assign]
    async with serving(engine) as rig:
        rig.serving.lanes.by_name["texts"].most = 9000
        first = asyncio.ensure_future(rig.inference.Generate(generate("a" * 8000)))
        await until(lambda: entered.acquire(blocking=False))
        try:
            failure = await failure_of(rig.inference.Generate(generate("b" * 5000)))
            assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "BUSY")
            assert failure.info.metadata["limit"] == "texts"
            await rig.inference.Generate(generate("c" * 500))
        finally:
            gate.set()
        await asyncio.wait_for(first, 20)


async def test_a_lane_counts_until_the_work_has_ended():
    """Also if nobody waits for it any more. One piece of work alone is never too much."""
    lane = Lane("test", 1, 10)
    gate, begun = threading.Event(), threading.Event()

    def held():
        begun.set()
        assert gate.wait(30)

    running = asyncio.ensure_future(lane.run(held, 99))
    await until(begun.is_set)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(Busy, match="test is 10"):
        await lane.run(lambda: None, 1)
    gate.set()
    await until(lambda: lane.held == 0)
    assert await lane.run(lambda: 7, 99) == 7
    lane.close()


async def test_many_ids_are_aborted_a_few_at_a_time():
    """The engine's lock is held while ids are looked up, and the event loop waits meanwhile."""
    ids = [f"r{i}" for i in range(1000)]
    request = inference_pb2.AbortRequest(request_ids=inference_pb2.RequestIds(ids=ids))
    async with serving(fake(hold=True)) as rig:
        calls = [
            asyncio.ensure_future(rig.inference.Generate(generate("a", request_id=i))) for i in ids[::500]
        ]
        await until(lambda: len(rig.engine.seen) == len(calls))
        asked: list[int] = []
        abort = rig.engine.abort

        def noted(request_ids=None, **target):
            asked.append(len(request_ids))
            return abort(request_ids, **target)

        rig.engine.abort = noted
        reply = await asyncio.wait_for(rig.inference.Abort(request), 20)
        del rig.engine.abort
        await asyncio.wait_for(asyncio.gather(*calls), 20)
    assert asked == [inference.ABORTED_AT_ONCE] * 4
    assert [result.request_id for result in reply.results] == ids
    aborted = [r.request_id for r in reply.results if r.outcome == inference_pb2.ABORT_OUTCOME_ABORTED]
    assert aborted == ids[::500]


async def test_many_outputs_leave_turns_to_others_and_an_abort_finds_all_of_them():
    """The abort comes when some outputs are in the engine; the rest never get there."""
    engine = fake(hold=True)
    submit = engine.submit

    def submit_noted(*arguments):
        submit(*arguments)
        if len(engine.seen) == inference.OUTPUTS_AT_ONCE:
            asyncio.get_running_loop().call_soon(abort)

    def abort():
        assert rig.serving.arrivals.abort(lambda name: name == "r", "enough") == ["r"]
        assert engine.abort(["r"], message="enough")

    engine.submit = submit_noted  # type: ignore[method-assign]
    async with serving(engine) as rig:
        request = generate("a", request_id="r", sampling={"n": 3 * inference.OUTPUTS_AT_ONCE})
        reply = await asyncio.wait_for(rig.inference.Generate(request), 20)
        assert len(engine.seen) == inference.OUTPUTS_AT_ONCE
        assert engine.load().pages_used == 0
    assert len(reply.outputs) == 3 * inference.OUTPUTS_AT_ONCE
    ends = {(output.finish.reason, output.finish.message) for output in reply.outputs}
    assert ends == {(types_pb2.FINISH_REASON_ABORTED, "enough")}
