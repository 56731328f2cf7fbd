"""Images in conversations: how they are written down, and what the template makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.chat.from_mappings import turns_of
from penstock.runtime.chat.messages import Chat, ChatTurn
from penstock.runtime.errors import InvalidRequest
from penstock.runtime.images.image import Image
from penstock.runtime.text.codec import TextCodec
from tests.support.chat import bytes_tokenizer

VL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}[image]{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
ONE, TWO = Image(b"one"), Image(b"two")


def rendered(*turns: ChatTurn, template: str = VL) -> str:
    return TextCodec(bytes_tokenizer(chat_template=template)).render_chat(Chat(turns))


def test_parts_are_rendered_in_their_order() -> None:
    turns = (
        ChatTurn("system", "Be brief."),
        ChatTurn("user", ("What is ", ONE, " and", TWO, "?")),
        ChatTurn("assistant", "Cats."),
        ChatTurn("user", (TWO,)),
    )
    assert rendered(*turns) == (
        "<system>Be brief.<user>What is [image] and[image]?<assistant>Cats.<user>[image]"
    )
    assert Chat(turns).images == [
        ("chat.messages[1].parts[1].image", ONE),
        ("chat.messages[1].parts[3].image", TWO),
        ("chat.messages[3].parts[0].image", TWO),
    ]


def test_parts_without_an_image_are_one_text() -> None:
    """Templates of models that read no images add `content` to a text."""
    template = "{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}"
    assert rendered(ChatTurn("user", ("a", "", "b")), ChatTurn("user", ()), template=template) == "[ab][]"


def test_mappings_may_have_parts(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"one")
    parts: list[Any] = [
        "a",
        ONE,
        {"type": "text", "text": "b"},
        {"type": "image", "image": ONE},
        {"type": "image", "image": b"one"},
        {"type": "image", "image": tmp_path / "one"},
    ]
    (turn,) = turns_of([{"role": "user", "content": parts}])
    assert turn.content == ("a", ONE, "b", ONE, ONE, ONE)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}],
        [{"type": "text", "text": 3}],
        [{"type": "image"}],
        [{"type": "image", "image": 3}],
        [{"type": "text", "text": "a", "more": 1}],
        [b"bytes"],
        b"bytes",
        3,
    ],
)
def test_other_parts_are_refused(content: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        turns_of([{"role": "user", "content": "a"}, {"role": "user", "content": content}])
    (bad,) = raised.value.violations
    assert bad.field == "chat.messages[1]"
    assert '"content"' in bad.description
