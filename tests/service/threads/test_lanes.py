"""Templates and grammars that callers write may take seconds, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # ships no hints

from penstock.runtime.requests.request import PreparedPrompt
from penstock.service.errors import Busy
from penstock.service.requests.generate import Features
from penstock.service.threads.lanes import MIB, MOST_TEMPLATES, Lane, Lanes
from penstock.v1 import control_pb2, types_pb2
from tests.service.codecs import byte_codec
from tests.service.rig import failure_of, fake, generate, serving, until

MANY = 40
"""More than asyncio's threads, which are at most 32."""
LONG = "a" * 500_001
CUT = {"truncation": types_pb2.TRUNCATION_LEFT}


class Held:
    """Stands in for a sandbox and for a compiler: every call takes until the test releases it."""

    def __init__(self) -> None:
        self.entered = 0
        self.gate = threading.Event()

    def render(self, variables):
        self._hold()
        return "y"

    def compile(self, grammar):
        self._hold()
        raise MemoryError  # what happens afterwards does not matter here

    def _hold(self):
        self.entered += 1
        assert self.gate.wait(30)


def chat(content="x", **fields):
    return types_pb2.ChatPrompt(messages=[types_pb2.ChatMessage(role="user", content=content)], **fields)


@pytest.mark.parametrize("what", ["templates", "grammars", "tokenize", "long texts", "long chats"])
async def test_others_are_served_meanwhile(what):
    held = Held()
    codec = byte_codec()
    codec._sandbox = held  # type: ignore[assignment]
    engine = fake(codec=codec, max_model_len=9000)
    engine.__dict__["grammars"] = held
    encode = codec.encode

    def encode_held(text, **options):
        if len(text) >= len(LONG):
            held._hold()
        return encode(text[:100], **options)

    codec.encode = encode_held  # type: ignore[method-assign]
    async with serving(engine, features=Features(request_templates=True)) as rig:
        own = chat(chat_template="{{ 1 }}")
        slow = {
            "templates": lambda: rig.inference.Generate(generate(chat=own)),
            "grammars": lambda: rig.inference.Generate(generate("a", constraint={"regex": "a"})),
            "long texts": lambda: rig.inference.Generate(generate(LONG, context=CUT)),
            "long chats": lambda: rig.inference.Generate(generate(chat=chat(LONG), context=CUT)),
            "tokenize": lambda: rig.control.Tokenize(control_pb2.TokenizeRequest(chat=own)),
        }[what]
        many = MOST_TEMPLATES if what in ("templates", "tokenize") else MANY
        waiting = [asyncio.ensure_future(slow()) for _ in range(many)]
        await until(lambda: held.entered > 0)
        try:
            others = asyncio.gather(
                rig.inference.Generate(generate(chat=chat(), stopping={"max_tokens": 1})),
                rig.inference.Generate(generate("y" * 5000, stopping={"max_tokens": 1})),
                rig.control.Tokenize(control_pb2.TokenizeRequest(chat=chat())),
            )
            replies = await asyncio.wait_for(others, 20)
            assert not any(call.done() for call in waiting)
        finally:
            held.gate.set()
        ended = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)
    assert (replies[0].outputs[0].text, replies[1].outputs[0].text) == ("}", "z")
    assert len(ended) == many


async def test_when_more_than_a_few_templates_wait_the_next_is_told_to_come_back():
    """An honest template behind hostile ones does not wait long: it is rendered soon, or refused at once."""
    held = Held()
    codec = byte_codec()
    codec._sandbox = held  # type: ignore[assignment]
    async with serving(fake(codec=codec), features=Features(request_templates=True)) as rig:
        own = chat(chat_template="{{ 1 }}")
        waiting = [
            asyncio.ensure_future(rig.inference.Generate(generate(chat=own))) for _ in range(MOST_TEMPLATES)
        ]
        await until(lambda: rig.serving.lanes.by_name["templates"].held == MOST_TEMPLATES)
        try:
            for call in (
                rig.inference.Generate(generate(chat=own)),
                rig.control.Tokenize(control_pb2.TokenizeRequest(chat=own)),
            ):
                failure = await failure_of(call)
                assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "BUSY")
                assert dict(failure.info.metadata) == {"limit": "templates", "max": str(MOST_TEMPLATES)}
                assert any(isinstance(d, error_details_pb2.RetryInfo) for d in failure.details)
        finally:
            held.gate.set()
        await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)


def heavy_chats():
    """Chats whose weight is not in the content of a turn, and of which no part is long by itself."""
    text = "a" * 150_000
    tools = [types_pb2.ToolDefinition(name=f"f{i}", description=text) for i in range(4)]
    calls = [types_pb2.ToolCall(id="1", name="f", arguments_json=json.dumps({"a": text})) for _ in range(4)]
    turns = [
        types_pb2.ChatMessage(role="user"),
        types_pb2.ChatMessage(role="assistant", tool_calls=calls),
        types_pb2.ChatMessage(role="user"),
    ]
    return {
        "tools": chat("", tools=tools),
        "calls": types_pb2.ChatPrompt(messages=turns),
        "options": chat("", template_options_json=json.dumps({"a": text * 4})),
    }


@pytest.mark.parametrize("what", ["tools", "calls", "options"])
async def test_all_of_a_chat_is_weighed(what):
    """All of it may be rendered and tokenized. So it must not keep short prompts from their threads, and it
    is bounded.
    """
    codec, gate = byte_codec(), threading.Event()

    def render(chat):
        assert gate.wait(30)
        return "y"

    codec.render_chat = render  # type: ignore[method-assign]
    heavy = heavy_chats()[what]
    async with serving(fake(codec=codec)) as rig:
        lanes = rig.serving.lanes.by_name
        lanes["long-texts"].most = 1_000_000
        for call in (
            lambda: rig.inference.Generate(generate(chat=heavy, stopping={"max_tokens": 1})),
            lambda: rig.control.Tokenize(control_pb2.TokenizeRequest(chat=heavy)),
        ):
            gate.clear()
            first = asyncio.ensure_future(call())
            try:
                await until(lambda: lanes["long-texts"].held > 600_000)
                assert lanes["texts"].held == 0
                failure = await failure_of(call())
                assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "BUSY")
                assert dict(failure.info.metadata) == {"limit": "long-texts", "max": "1000000"}
            finally:
                gate.set()
            await asyncio.wait_for(first, 20)
            await until(lambda: lanes["long-texts"].held == 0)


@pytest.mark.parametrize(("num_words", "inline"), [(3, True), (1000, False)])
async def test_many_bad_words_are_spelt_off_the_loop(num_words, inline):
    """Each costs two calls of the tokenizer."""
    codec = byte_codec()
    encode, on_loop = codec.encode, []

    def noted(text, **options):
        on_loop.append(threading.current_thread() is threading.main_thread())
        return encode(text, **options)

    codec.encode = noted  # type: ignore[method-assign]
    words = [f"w{i}" for i in range(num_words)]
    async with serving(fake(codec=codec)) as rig:
        request = generate(prompt_token_ids={"ids": [121]}, sampling={"bad_words": words})
        await rig.inference.Generate(request)
        spelt = rig.engine.seen[0].sampling.bad_words
    assert on_loop == [inline] * 2 * num_words
    assert spelt == tuple(tuple(text.encode()) for word in words for text in (word, f" {word}"))


@pytest.mark.parametrize(("num_tokens", "is_long"), [(2048, False), (2049, True)])
async def test_long_prompts_are_checked_and_hashed_off_the_event_loop(num_tokens, is_long):
    """Every output of the request is submitted with what the thread made."""
    engine = fake(max_model_len=9000)
    prepare, submit = engine.prepare, engine.submit
    threads: list[threading.Thread] = []
    given: list[tuple[PreparedPrompt | None, bool]] = []

    def prepare_noted(request):
        threads.append(threading.current_thread())
        return prepare(request)

    def submit_noted(request, sink, prepared=None):
        given.append((prepared, prepared is not None and prepared.token_ids is request.prompt_token_ids))
        submit(request, sink, prepared)

    engine.prepare = prepare_noted  # type: ignore[method-assign]
    engine.submit = submit_noted  # type: ignore[method-assign]
    ids = types_pb2.TokenIds(ids=[97] * num_tokens)
    async with serving(engine) as rig:
        await rig.inference.Generate(
            generate(prompt_token_ids=ids, stopping={"max_tokens": 1}, sampling={"n": 2})
        )
    assert [thread is threading.main_thread() for thread in threads] == [not is_long], "once for both"
    assert [is_same for _, is_same in given] == [True, True]
    assert len({id(prepared) for prepared, _ in given}) == 1


async def test_a_prompt_that_fills_a_long_context_does_not_wait_with_those_that_only_come_to_be_cut():
    codec = byte_codec()
    gate, entered = threading.Event(), []

    def encode(text, **options):
        entered.append(len(text))
        assert gate.wait(30)
        return [97] * 3

    codec.encode = encode  # type: ignore[method-assign]
    async with serving(fake(codec=codec, max_model_len=131_072)) as rig:
        lanes = rig.serving.lanes.by_name
        for num_chars, lane in ((8 * 131_072, lanes["texts"]), (8 * 131_072 + 1, lanes["long-texts"])):
            call = asyncio.ensure_future(rig.inference.Generate(generate("a" * num_chars, context=CUT)))
            try:
                await until(lambda num_chars=num_chars: num_chars in entered)  # type: ignore[misc]
                assert lane.held == num_chars
            finally:
                gate.set()
            await asyncio.wait_for(call, 20)
            gate.clear()


async def test_work_that_raises_stop_iteration_is_not_awaited_for_ever() -> None:
    """asyncio cannot hand a StopIteration on, so the lane must make another error of it."""
    lane = Lane("some", 1, 10)
    try:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(lane.run(lambda: next(iter(()))), 30)
    finally:
        lane.close()


async def test_there_is_room_for_several_of_the_largest_messages() -> None:
    """Else one of 64 MiB, with images, would keep all others out."""
    for max_message_bytes, messages, images in (
        (8 * MIB, 64 * MIB, 256 * MIB),
        (64 * MIB, 512 * MIB, 512 * MIB),
    ):
        lanes = Lanes(max_message_bytes=max_message_bytes)
        assert (lanes.by_name["convert"].most, lanes.by_name["images"].most) == (messages, images)
        lanes.close()


async def test_each_image_counts_beside_the_message_that_brought_it() -> None:
    lanes, gate = Lanes(), threading.Event()
    held = asyncio.ensure_future(lanes.images(lambda: gate.wait(20), 3, 1000))
    await asyncio.sleep(0)
    assert lanes.by_name["images"].held == 3 * MIB + 1000
    with pytest.raises(Busy) as refused:
        await lanes.images(lambda: None, 254, 0)
    assert refused.value.limit == "images"
    gate.set()
    assert await held
    lanes.close()
