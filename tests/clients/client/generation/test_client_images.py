"""Pictures in requests: from files, bytes and data: URLs to the contract's messages."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.client import AsyncClient, ChatMessage, ChatOptions, Client, Image
from penstock.client.generation.requests import chat_prompt
from penstock.v1 import types_pb2

PNG = b"\x89PNG\r\n\x1a\n and more"
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def turn_of(content: Any) -> types_pb2.ChatMessage:
    options = {"messages": [{"role": "user", "content": content}]}
    (turn,) = chat_prompt(cast(ChatOptions, options)).messages
    return turn


def parts(*sent: str | types_pb2.Image) -> types_pb2.ChatMessage:
    made = [
        types_pb2.ContentPart(text=part) if isinstance(part, str) else types_pb2.ContentPart(image=part)
        for part in sent
    ]
    return types_pb2.ChatMessage(role="user", parts=made)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cat.png"
    path.write_bytes(PNG)
    return path


def test_a_picture_of_a_file_or_of_bytes(file: Path) -> None:
    assert Image(file) == Image(str(file)) == Image(PNG) == Image(bytearray(PNG))
    assert Image(PNG, "image/png") != Image(PNG)
    assert pickle.loads(pickle.dumps(Image(PNG, "image/png"))) == Image(PNG, "image/png")
    assert "PNG" not in repr(Image(PNG)), "megabytes must not be printed"
    with pytest.raises(FileNotFoundError):
        Image(file.with_name("dog.png"))
    for wrong in (None, 7, ["cat.png"]):
        with pytest.raises(TypeError, match="give the path of a file, or its bytes"):
            Image(cast(Any, wrong))


def test_parts_of_a_turn_stand_in_their_order(file: Path) -> None:
    image = types_pb2.Image(data=PNG)
    assert turn_of(["What is this?", Image(file)]) == parts("What is this?", image)
    assert turn_of((Image(PNG, "image/png"), "And", "this?")) == parts(
        types_pb2.Image(data=PNG, media_type="image/png"), "And", "this?"
    )
    assert turn_of("only words") == types_pb2.ChatMessage(role="user", content="only words")
    same = chat_prompt({"messages": [ChatMessage("user", [Image(PNG), "x"])]})
    assert same.messages[0] == parts(image, "x")


@pytest.mark.parametrize("source", [PNG, Image(PNG), "file"])
def test_parts_that_are_mappings(file: Path, source: Any) -> None:
    found = file if source == "file" else source
    content = [{"type": "text", "text": "What is this?"}, {"type": "image", "image": found}]
    assert turn_of(content) == parts("What is this?", types_pb2.Image(data=PNG))


def test_openais_form_of_a_picture() -> None:
    content = [{"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}]
    assert turn_of(content) == parts(types_pb2.Image(data=PNG, media_type="image/png"))
    data = URL.partition(",")[2]
    assert Image.from_data_url("DATA:;base64," + data) == Image(PNG)
    assert Image.from_data_url("data:image/jpg;base64," + data).media_type == "image/jpeg"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}], "addresses are not fetched"),
        ([{"type": "image_url", "image_url": {"url": URL, "detail": "low"}}], "detail must be"),
        ([{"type": "image_url", "image_url": {"url": URL, "size": 3}}], "unknown keys: size"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png,x"}}], "must be in base64"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}], "is not base64"),
        ([{"type": "image_url", "image_url": URL}], "must be a text, an Image"),
        (["a", {"type": "video", "video": PNG}], r"content\[1\]: must be a text, an Image"),
        ([{"type": "text", "text": "x", "more": 1}], r"content\[0\]: must be a text"),
        ([{"type": "image", "image": 7}], r"content\[0\]: give the path of a file"),
        ([PNG], r"content\[0\]: must be a text, an Image"),
        (PNG, "content: must be a text or a sequence of parts, not bytes"),
        (Image(PNG), "content: must be a text or a sequence of parts, not Image"),
    ],
)
def test_what_is_no_part(content: Any, message: str) -> None:
    with pytest.raises(TypeError, match=r"messages\[0\]: .*" + message):
        turn_of(content)


async def test_both_clients_send_them_with_generate_and_stream(server: Any, file: Path) -> None:
    messages = [{"role": "user", "content": ["What is this?", Image(file)]}]
    with Client(server.addr) as client:
        client.generate(messages=messages)
        with client.stream("<image>", media=[Image(file)]) as stream:
            stream.result()
    async with AsyncClient(server.addr) as asynchronous:
        await asynchronous.generate(token_ids=[5], media=[Image(file)])
        async with asynchronous.stream(messages=messages) as events:
            await events.result()
    expected, image = parts("What is this?", types_pb2.Image(data=PNG)), types_pb2.Image(data=PNG)
    assert [list(call.chat.messages) for call in server.calls] == [[expected], [], [], [expected]]
    assert [list(call.media) for call in server.calls] == [[], [image], [image], []]
