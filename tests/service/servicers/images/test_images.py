"""Images in conversations and beside prompts, from the message to the engine's request and to the usage."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from penstock.runtime.prompting.prompts import Truncation
from penstock.service.errors import Busy
from penstock.service.limits.admission import HeldImages
from penstock.v1 import control_pb2, types_pb2
from tests.service.rig import collect, failure_of, generate, ids, serving, stream, until
from tests.service.servicers.images.image_engine import IMAGE, Processor, image_engine, image_file

ONE: dict[str, Any] = {"stopping": {"max_tokens": 1}, "output": {"echo_prompt_token_ids": True}}
TWO_TOKENS, FOUR_TOKENS = image_file(16, 8), image_file(16, 16, "JPEG")


def chat(*parts: str | bytes) -> dict[str, Any]:
    """Make a turn of words and images."""
    sent = [{"text": part} if isinstance(part, str) else {"image": {"data": part}} for part in parts]
    return {"chat": {"messages": [types_pb2.ChatMessage(role="user", parts=sent)]}}  # type: ignore[arg-type]


def media(*images: bytes) -> list[types_pb2.Image]:
    return [types_pb2.Image(data=data) for data in images]


async def both(rig: Any, prompt: str | None = None, **fields: Any) -> types_pb2.Usage:
    """Generate and Stream give the engine the same prompt with the same images, and count the same."""
    reply = await rig.inference.Generate(generate(prompt, **ONE, **fields))
    messages = await collect(rig.inference.Stream(stream(prompt, **ONE, **fields)))
    assert list(reply.prompt.token_ids) == list(messages[0].started.prompt.token_ids)
    summary = messages[-1].summary.usage
    assert (reply.usage.prompt_tokens, reply.usage.image_tokens) == (
        summary.prompt_tokens,
        summary.image_tokens,
    )
    one, other = rig.engine.seen[-2:]
    assert list(one.prompt_token_ids) == list(other.prompt_token_ids) == list(reply.prompt.token_ids)
    assert [item.digest for item in one.media] == [item.digest for item in other.media]
    usage: types_pb2.Usage = reply.usage
    return usage


async def test_images_of_a_turn_stand_in_its_prompt_and_its_usage() -> None:
    async with serving(image_engine()) as rig:
        asked = chat("Is ", TWO_TOKENS, " in ", FOUR_TOKENS, "?")
        usage = await both(rig, **asked)
        expected = [*ids("u:Is "), IMAGE, IMAGE, *ids(" in "), *[IMAGE] * 4, *ids("?|")]
        request = rig.engine.seen[-1]
        assert list(request.prompt_token_ids) == expected
        assert [(item.start, item.num_tokens) for item in request.media] == [(5, 2), (11, 4)]
        assert request.rotary is not None
        assert (usage.prompt_tokens, usage.image_tokens) == (len(expected), 6)
        tokenized = await rig.control.Tokenize(control_pb2.TokenizeRequest(**asked))
        assert list(tokenized.token_ids) == expected


async def test_a_media_type_may_be_told() -> None:
    parts = [types_pb2.ContentPart(image=types_pb2.Image(data=FOUR_TOKENS, media_type="image/jpeg"))]
    turn = types_pb2.ChatMessage(role="user", parts=parts)
    async with serving(image_engine()) as rig:
        assert (await both(rig, chat={"messages": [turn]})).image_tokens == 4


async def test_media_belong_to_the_places_of_a_prompt() -> None:
    async with serving(image_engine()) as rig:
        usage = await both(rig, "a<|image|>b<|image|>", media=media(TWO_TOKENS, FOUR_TOKENS))
        assert list(rig.engine.seen[-1].prompt_token_ids) == [97, IMAGE, IMAGE, 98, *[IMAGE] * 4]
        assert usage.image_tokens == 6
        given = types_pb2.TokenIds(ids=[97, IMAGE, 98])
        usage = await both(rig, prompt_token_ids=given, media=media(FOUR_TOKENS))
        assert list(rig.engine.seen[-1].prompt_token_ids) == [97, *[IMAGE] * 4, 98]
        assert usage.image_tokens == 4
        assert (await both(rig, "no image")).image_tokens == 0
        text = await rig.control.Tokenize(control_pb2.TokenizeRequest(text="a<|image|>"))
        assert list(text.token_ids) == [97, IMAGE], "a text comes without images"


async def test_parts_of_words_are_one_text_for_any_model() -> None:
    async with serving() as rig:
        await rig.inference.Generate(generate(**ONE, **chat("Is ", "it", "?")))
        assert list(rig.engine.seen[-1].prompt_token_ids) == ids("u:Is it?|")


async def test_a_server_that_cuts_prompts_does_not_cut_those_with_images() -> None:
    async with serving(image_engine(), truncation=Truncation.LEFT) as rig:
        assert (await both(rig, **chat(TWO_TOKENS))).image_tokens == 2
        failure = await failure_of(rig.inference.Generate(generate(**chat("x" * 60, FOUR_TOKENS), **ONE)))
        assert failure.reason == "PROMPT_TOO_LONG"


async def test_the_model_tells_what_it_takes() -> None:
    async with serving(image_engine()) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert control_pb2.FEATURE_IMAGES in info.features
        assert info.image_limits == control_pb2.ImageLimits(
            max_images=3,
            max_image_bytes=5000,
            max_image_pixels=4096,
            media_types=["image/png", "image/jpeg", "image/webp", "image/gif"],
            image_token_id=IMAGE,
        )
    async with serving() as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert control_pb2.FEATURE_IMAGES not in info.features
        assert not info.HasField("image_limits")


async def test_the_log_tells_how_the_limits_of_images_and_requests_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(image_engine(), max_receive_bytes=5000):
        assert "--max-receive-bytes" not in caplog.text
    async with serving(image_engine(), max_receive_bytes=4999):
        assert "an image may have 5000 bytes, but a whole request only 4999" in caplog.text


async def test_the_server_answers_while_an_image_is_read() -> None:
    """The work is done on threads of its own, and a caller that goes away is noticed."""
    processor = Processor()
    processor.gate.clear()
    async with serving(image_engine(processor)) as rig:
        waiting = asyncio.ensure_future(rig.inference.Generate(generate(**chat(TWO_TOKENS), **ONE)))
        await until(lambda: processor.num_begun == 1)
        for _ in range(3):
            await rig.control.GetLoad(control_pb2.GetLoadRequest())
        assert not waiting.done()
        processor.gate.set()
        assert (await waiting).usage.image_tokens == 2
    assert all(name.startswith("penstock-images") for name in processor.threads)


async def test_images_that_requests_hold_are_bounded() -> None:
    """An image of two tokens has 8 patches of 64 bytes. A server with room for less takes one such request
    at a time, and after its end another one, whichever way it ended.
    """
    async with serving(image_engine(hold=True), max_held_image_bytes=600) as rig:
        call = rig.inference.Generate(generate(**chat(TWO_TOKENS), **ONE))
        running = asyncio.ensure_future(call)
        await until(lambda: len(rig.engine.seen) == 1)
        assert rig.serving.held_images.num_bytes == 512
        failure = await failure_of(rig.inference.Generate(generate(**chat(TWO_TOKENS), **ONE)))
        assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "BUSY")
        assert failure.info.metadata["limit"] == "max_held_image_bytes"
        assert len(rig.engine.seen) == 1
        call.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: rig.serving.held_images.num_bytes == 0)
        rig.engine.release()
        reply = await rig.inference.Generate(generate(**chat(TWO_TOKENS), **ONE))
        assert reply.usage.image_tokens == 2
        await until(lambda: rig.serving.held_images.num_bytes == 0)


def test_one_request_alone_never_holds_too_much() -> None:
    held = HeldImages(100)
    held.hold(1000)
    with pytest.raises(Busy) as refused:
        held.hold(1)
    assert (refused.value.limit, refused.value.most) == ("max_held_image_bytes", 100)
    held.hold(0)  # a request without images
    held.release(1000)
    held.hold(60)
    held.hold(40)
    assert held.num_bytes == 100
