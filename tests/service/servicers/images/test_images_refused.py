"""What is refused of images, by which field, and that nothing is decoded before."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.v1 import types_pb2
from tests.service.rig import Failure, Rig, failure_of, generate, serving, stream
from tests.service.servicers.images.image_engine import IMAGE, Processor, image_engine, image_file
from tests.service.servicers.images.test_images import chat, media

PNG = image_file()
NO_IMAGE = b"<svg xmlns='http://www.w3.org/2000/svg'/>"


def image(data: bytes = PNG, media_type: str = "") -> types_pb2.ContentPart:
    return types_pb2.ContentPart(image=types_pb2.Image(data=data, media_type=media_type))


def turn(*parts: types_pb2.ContentPart, **fields: Any) -> types_pb2.ChatMessage:
    return types_pb2.ChatMessage(role="user", parts=parts, **fields)


async def refused(rig: Rig, prompt: str | None = None, **fields: Any) -> Failure:
    """Return the answer of Generate, which is Stream's, too."""
    failure = await failure_of(rig.inference.Generate(generate(prompt, **fields)))
    streamed = await failure_of(rig.inference.Stream(stream(prompt, **fields)).read())
    assert (failure.code, failure.reason, failure.message) == (
        streamed.code,
        streamed.reason,
        streamed.message,
    )
    return failure


async def test_a_model_without_vision_names_every_image() -> None:
    async with serving() as rig:
        messages = [turn(types_pb2.ContentPart(text="a"), image()), turn(image(b""), image())]
        failure = await refused(rig, chat={"messages": messages})
        assert (failure.code.name, failure.reason) == ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE")
        paths = ["chat.messages[0].parts[1].image", *(f"chat.messages[1].parts[{j}].image" for j in (0, 1))]
        assert failure.info.metadata["field"] == ",".join(paths)
        assert "the model reads no images" in failure.message
        failure = await refused(rig, "a", media=media(PNG))
        assert (failure.reason, failure.info.metadata["field"]) == ("UNSUPPORTED_FEATURE", "media")
        assert "the model reads no images" in failure.message


async def test_all_that_is_wrong_is_told_at_once_and_nothing_is_decoded() -> None:
    processor = Processor()
    messages = [
        turn(image(b""), image(PNG, "image/jpeg"), types_pb2.ContentPart()),
        turn(image(b"\x89PNG\r\n\x1a\n" + bytes(5000)), content="both"),
    ]
    async with serving(image_engine(processor)) as rig:
        failure = await refused(rig, chat={"messages": messages}, sampling={"temperature": -1})
        assert failure.reason == "INVALID_FIELD"
        violations = failure.violations
        assert violations.pop("sampling.temperature")
        assert violations == {
            "chat.messages[0].parts[0].image.data": "must not be empty",
            "chat.messages[0].parts[1].image.media_type": "is 'image/jpeg', and the data is image/png",
            "chat.messages[0].parts[2]": "one of text and image is required",
            "chat.messages[1].parts": "not together with content",
            "chat.messages[1].parts[0].image.data": "has 5008 bytes; at most 5000 are taken",
        }
        failure = await refused(
            rig, "<|image|>", media=media(NO_IMAGE), stopping={"min_tokens": 2, "max_tokens": 1}
        )
        assert set(failure.violations) == {"media[0].data", "stopping.min_tokens"}
        assert rig.engine.seen == []
    assert processor.num_begun == 0


@pytest.mark.parametrize(
    ("fields", "field", "told"),
    [
        (chat("a", *[PNG] * 4), "chat.messages", "at most 3 images"),
        ({"prompt": "<|image|>" * 4, "media": media(*[PNG] * 4)}, "media", "at most 3 images"),
        ({"prompt": "a", "media": media(PNG)}, "media", "1 images, and the prompt has 0 places"),
        ({"prompt": "a<|image|>"}, "media", "0 images, and the prompt has 1 places"),
        (chat("<|image|>", PNG), "chat.messages", "1 images, and the prompt has 2 places"),
        ({**chat("a"), "media": media(PNG)}, "media", "not together with chat"),
        (
            {"prompt_token_ids": types_pb2.TokenIds(ids=[IMAGE]), "media": media(PNG, PNG)},
            "media",
            "2 images, and the prompt has 1 places",
        ),
        (chat(image_file(16, 16, "JPEG")[:-20]), "chat.messages[0].parts[0].image.data", "cannot be decoded"),
        ({"prompt": "<|image|>", "media": media(image_file(65, 64))}, "media[0].data", "has 65 x 64 pixels"),
        (
            {**chat(PNG), "context": {"truncation": types_pb2.TRUNCATION_LEFT}},
            "context.truncation",
            "a prompt with images is not cut",
        ),
    ],
)
async def test_a_wrong_image_is_told_by_its_field(fields: dict[str, Any], field: str, told: str) -> None:
    async with serving(image_engine()) as rig:
        failure = await refused(rig, **fields)
        assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert list(failure.violations) == [field]
        assert told in failure.violations[field]


async def test_a_prompt_that_images_make_too_long_is_refused_before_they_are_decoded() -> None:
    processor = Processor()
    async with serving(image_engine(processor, max_model_len=16)) as rig:
        failure = await refused(rig, **chat("a", image_file(32, 32)))
        assert failure.reason == "PROMPT_TOO_LONG"
    assert processor.num_begun == 0


async def test_too_many_parts() -> None:
    messages = [turn(*[types_pb2.ContentPart(text="x")] * 6000)] * 2
    async with serving(image_engine()) as rig:
        failure = await refused(rig, chat={"messages": messages})
        assert list(failure.violations) == ["chat.messages[1].parts"]
