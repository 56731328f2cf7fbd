"""Images in requests: from files, bytes and data: URLs to the contract's messages."""

from __future__ import annotations

import base64
import pickle
import string
import urllib.parse
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_an_image_of_a_file_or_of_bytes(file: Path) -> None:
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


def test_openais_form_of_an_image() -> None:
    content = [{"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}]
    assert turn_of(content) == parts(types_pb2.Image(data=PNG, media_type="image/png"))


FORGIVING_BASE64 = {
    "": [],
    "abcd": [105, 183, 29],
    " abcd": [105, 183, 29],
    "abcd ": [105, 183, 29],
    " abcd===": None,
    "abcd=== ": None,
    "abcd ===": None,
    "a": None,
    "ab": [105],
    "abc": [105, 183],
    "abcde": None,
    "\U00010000": None,
    "=": None,
    "====": None,
    "a=": None,
    "a==": None,
    "a===": None,
    "ab=": None,
    "ab==": [105],
    "ab===": None,
    "ab====": None,
    "abc=": [105, 183],
    "abc==": None,
    "abc=====": None,
    "abcd=": None,
    "abcd====": None,
    "=a": None,
    "a=b=": None,
    "ab=c": None,
    "abc=d=": None,
    "ab\tcd": [105, 183, 29],
    "ab\ncd": [105, 183, 29],
    "ab\fcd": [105, 183, 29],
    "ab\rcd": [105, 183, 29],
    "ab cd": [105, 183, 29],
    "ab\u00a0cd": None,
    " \t\n\f\r ab\t\n\f\r cd\t\n\f\r ": [105, 183, 29],
    "ab\t\n\f\r =\t\n\f\r =\t\n\f\r ": [105],
    "/A": [252],
    "//A": [255, 240],
    "///A": [255, 255, 192],
    "////A": None,
    "A/": [3],
    "AA/": [0, 15],
    "AAA/": [0, 0, 63],
    "\x00nonsense": None,
    "abcd\x00nonsense": None,
    # What the tables below do not have: the other alphabet, escapes, and halves of characters.
    "ab-_": None,
    "ab%63d": [105, 183, 29],
    "%61%62%63%64": [105, 183, 29],
    "ab%3D%3d": [105],
    "ab%0D%0Acd": [105, 183, 29],
    "ab%2563d": None,
    "abc%": None,
    "ab%3": None,
    "ab%zzcd": None,
    "ab%FFcd": None,
    "ab\ud800d": None,
    "abcd#ef": [105, 183, 29],
    "abcd%23ef": None,
}
"""What is in data: URLs, and the bytes that it stands for; None: it is no base64. The first rows are of
base64.json of web-platform-tests (fetch/data-urls/resources), with which browsers are tested.
"""

HEADS: dict[str, str | None] = {
    "data:;base64": "",
    "DATA:;BASe64": "",
    " \n\x00data:;base64": "",
    "da\nta:;ba\tse64": "",
    "data: ;base64": "",
    "data:;base64 ": "",
    "data:;   base64": "",
    "data:;base64;base64": "",
    "data:x/x;base64;charset=x;base64": "x/x",
    "data:image/png;base64": "image/png",
    "data: IMAGE/PNG ;base64": "image/png",
    "data:image/png;charset=utf-8;base64": "image/png",
    'data:image/png;name="a;b";BASE64': "image/png",
    "data:image/jpg;base64": "image/jpeg",
    "data:x/x;base64;charset=x": None,
    "data:x/x;base64;base64x": None,
    "data:;base64;": None,
    "data:;base64=x": None,
    "data:;base 64": None,
    "data:;ba\u017fe64": None,
    "data:;%62ase64": None,
    "data:%3Bbase64": None,
    "data:base64": None,
    "data:;base64\f": None,
    "data:": None,
    "data:image/png": None,
}
"""What stands before the comma, and the media type; None: the data is not in base64. Most rows are of
data-urls.json of web-platform-tests. `; base64` is of the Fetch standard's text: spaces may precede it.
"""


@pytest.mark.parametrize("told", FORGIVING_BASE64)
def test_the_data_of_a_url_is_read_as_browsers_read_it(told: str) -> None:
    expected = FORGIVING_BASE64[told]
    if expected is None:
        with pytest.raises(ValueError, match=r"^the data of the URL is not base64: "):
            Image.from_data_url("data:;base64," + told)
    else:
        assert Image.from_data_url("data:;base64," + told) == Image(bytes(expected))


@pytest.mark.parametrize("head", HEADS)
def test_the_head_of_a_url_is_read_as_browsers_read_it(head: str) -> None:
    expected = HEADS[head]
    if expected is None:
        with pytest.raises(ValueError, match=r"^the data of a data: URL must be in base64$"):
            Image.from_data_url(head + ",abcd")
    else:
        assert Image.from_data_url(head + ",abcd") == Image(bytes([105, 183, 29]), expected)


@pytest.mark.parametrize("url", ["", "data", "data;base64,abcd", "data:;base64", "data:#,abcd", "x data:,a"])
def test_what_is_no_data_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"^must be a data: URL, such as"):
        Image.from_data_url(url)


@given(st.binary(max_size=40), st.data())
def test_bytes_come_through_every_spelling_of_their_url(data: bytes, draw: st.DataObject) -> None:
    """Each character as it is or as an escape, with white space after it, and with or without padding."""
    whole = base64.b64encode(data).decode()
    spelt = [
        draw.draw(st.sampled_from([sign, f"%{ord(sign):02x}", f"%{ord(sign):02X}"]))
        + draw.draw(st.sampled_from(["", "", "", " ", "\r\n", "%20", "%0A"]))
        for sign in draw.draw(st.sampled_from([whole, whole.rstrip("=")]))
    ]
    assert Image.from_data_url("data:image/png;base64," + "".join(spelt)) == Image(data, "image/png")


@given(st.text("abAB012%=", max_size=12))
def test_escapes_are_decoded_once(told: str) -> None:
    """What a URL is read as is what it is read as when the standard library has decoded its escapes.

    What then is neither base64 nor white space is refused. As it is, it may mean something else in a URL.
    """
    decoded = urllib.parse.unquote(told, "latin-1")
    is_base64 = set(decoded) <= {*string.ascii_letters, *string.digits, *"+/=", *" \t\n\f\r"}
    assert read("data:;base64," + told) == (read("data:;base64," + decoded) if is_base64 else None)


def read(url: str) -> bytes | None:
    try:
        return Image.from_data_url(url).data
    except ValueError:
        return None


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
