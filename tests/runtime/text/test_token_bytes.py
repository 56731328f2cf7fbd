"""The bytes of single tokens, compared with Hugging Face's decode and with the text that was encoded."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.text.codec import TextCodec
from tests.runtime.text.codecs import CODECS, VOCABULARY, reference
from tests.support.goldens import GOLDEN, NAMES

GOLDENS = {name: TextCodec.from_pretrained(GOLDEN / name) for name in NAMES}
EXACT, ALONE = ("bytes", "golden", "llama2", "gemma"), ("wordpiece", "metaspace")


def joined(codec: TextCodec, ids: list[int]) -> bytes:
    return b"".join(map(codec.token_bytes.of, ids))


@pytest.mark.parametrize("name", EXACT)
def test_each_token_alone_is_hugging_faces_decode_of_it(name: str) -> None:
    """A token that is no whole character has its bytes, where Hugging Face tells U+FFFD for them."""
    known = CODECS[name].token_bytes
    assert known.is_exact
    for i in range(VOCABULARY[name]):
        text = known.of(i).decode(errors="replace")
        assert text.removeprefix(" " * known.dropped_leading_spaces) == reference(name, [i], skip=False), i


@pytest.mark.parametrize("name", ["bytes", "golden"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_joined_bytes_are_the_decode_of_all_tokens(name: str, data: st.DataObject) -> None:
    """Random tokens, special ones among them; most spell invalid UTF-8."""
    ids = data.draw(st.lists(st.integers(0, VOCABULARY[name] - 1), max_size=40))
    assert joined(CODECS[name], ids).decode(errors="replace") == reference(name, ids, skip=False)


@pytest.mark.parametrize(("name", "dropped"), [("llama2", 1), ("gemma", 0)])
@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.integers(256, 262).map(lambda i: [i]) | st.text(max_size=3).map(str.encode).map(list))
)
def test_joined_bytes_of_sentencepiece(name: str, dropped: int, words: list[list[int]]) -> None:
    """The tokens are words, and byte tokens that spell valid UTF-8. One leading space is dropped, if the
    decoder strips one.
    """
    codec = CODECS[name]
    ids = [i for word in words for i in word]
    assert codec.token_bytes.dropped_leading_spaces == dropped
    text = joined(codec, ids).decode()
    assert text.removeprefix(" " * dropped) == reference(name, ids, skip=False)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_texts_tokens_have_its_bytes(name: str, text: str) -> None:
    codec = GOLDENS[name]
    text = unicodedata.normalize("NFC", text)  # as Qwen's tokenizers do first
    assert joined(codec, codec.encode(text, add_special_tokens=False)) == text.encode()


@pytest.mark.parametrize("name", ALONE)
def test_tokens_without_bytes_have_their_text_alone(name: str) -> None:
    known = CODECS[name].token_bytes
    assert (known.is_exact, known.dropped_leading_spaces) == (False, 0)
    for i in range(VOCABULARY[name]):
        assert known.of(i) == reference(name, [i], skip=False).encode()


@pytest.mark.parametrize("name", CODECS)
def test_special_tokens_are_those_that_a_text_may_leave_out(name: str) -> None:
    codec = CODECS[name]
    for i in range(VOCABULARY[name]):
        is_left_out = reference(name, [i], skip=True) != reference(name, [i], skip=False)
        assert (i in codec.token_bytes.special) == is_left_out, i


@pytest.mark.parametrize("name", CODECS)
def test_an_id_that_the_tokenizer_does_not_have_has_no_bytes(name: str) -> None:
    assert CODECS[name].token_bytes.of(VOCABULARY[name] + 5) == b""
