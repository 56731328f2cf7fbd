"""Tokenizing, incremental detokenizing and stop strings, compared with Hugging Face's decode of whole
sequences.
"""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from penstock.runtime.errors import ConfigError, InvalidRequest
from penstock.runtime.text.assembler import TextStream
from penstock.runtime.text.codec import TextCodec
from penstock.runtime.text.decoder import PieceDecoder, WindowDecoder
from tests.runtime.text.codecs import (
    BYTES,
    CODECS,
    EOS,
    GOLDEN,
    VOCABULARY,
    WITNESSES,
    bytes_tokenizer,
    reference,
)


def chunks_of(items: list[int], cuts: list[int]) -> list[list[int]]:
    """Return the items, split at the cut positions. Pieces may be empty, as in steps that make no token."""
    marks = [0, *sorted(min(c, len(items)) for c in cuts), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(marks)]


def stream_text(stream: TextStream, pieces: list[list[int]]) -> tuple[str, str | None, int]:
    """Return the whole text, the stop that matched, and the number of tokens that belong to the output."""
    text, stop, kept = "", None, 0
    for i, piece in enumerate(pieces):
        delta = stream.push(piece, final=i == len(pieces) - 1)
        text, stop, kept = text + delta.text, stop or delta.stop, kept + delta.num_tokens
    return text, stop, kept


@pytest.mark.parametrize("name", ["bytes", "golden", "wordpiece", "metaspace"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_deltas_are_the_whole_decode(name: str, data: st.DataObject) -> None:
    """Random tokens, mostly invalid UTF-8, in random pieces: their text is that of Hugging Face's decode of
    all of them.
    """
    ids = data.draw(st.lists(st.integers(0, VOCABULARY[name] - 1), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=10))
    skip = data.draw(st.booleans())
    text, stop, kept = stream_text(TextStream(CODECS[name], skip_special_tokens=skip), chunks_of(ids, cuts))
    assert (text, stop, kept) == (reference(name, ids, skip), None, len(ids))
    assert CODECS[name].decode(ids, skip_special_tokens=skip) == text


def spell_utf8(text: str) -> list[int]:
    return list(text.encode())


def joined(words: list[list[int]]) -> list[int]:
    return [i for word in words for i in word]


LETTERS = st.text(max_size=3).map(spell_utf8)


@pytest.mark.parametrize("name", ["llama2", "gemma"])
@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.one_of(st.integers(256, 262).map(lambda i: [i]), st.text(max_size=3).map(spell_utf8))),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_sentencepiece_is_the_whole_decode(name: str, words: list[list[int]], cuts: list[int]) -> None:
    """The tokens are words, and byte tokens that spell valid UTF-8."""
    ids = [i for word in words for i in word]
    text, _, _ = stream_text(TextStream(CODECS[name]), chunks_of(ids, cuts))
    assert text == reference(name, ids, skip=True)


WORDS = {name: st.lists(st.integers(0, VOCABULARY[name] - 1)) for name in ("wordpiece", "metaspace")} | {
    name: st.lists(st.one_of(st.integers(256, VOCABULARY[name] - 1).map(lambda i: [i]), LETTERS)).map(joined)
    for name in ("bytes", "llama2", "gemma")
}
"""Tokens that end no text within a character, for each kind of decoder."""


@pytest.mark.parametrize("name", WORDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_prompt_and_what_follows_it_are_the_decode_of_both(name: str, data: st.DataObject) -> None:
    """Hugging Face's decode of all tokens is that of the prompt's, with the text of the others after it."""
    prompt, ids = data.draw(WORDS[name]), data.draw(WORDS[name])
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=10))
    skip = data.draw(st.booleans())
    stream = TextStream(CODECS[name], skip_special_tokens=skip, after=prompt)
    text, _, _ = stream_text(stream, chunks_of(ids, cuts))
    assert reference(name, prompt, skip) + text == reference(name, prompt + ids, skip)


def test_sentencepiece_keeps_valid_bytes_next_to_invalid_ones() -> None:
    """This is a documented difference: Hugging Face turns the whole run of byte tokens into U+FFFD."""
    ids = [*"\u00e9".encode(), 0xFF]
    assert reference("gemma", ids, skip=True) == "\ufffd" * 3
    assert CODECS["gemma"].decode(ids) == "\u00e9\ufffd"


def test_a_character_is_never_split() -> None:
    stream = TextStream(BYTES)
    deltas = [stream.push([b]).text for b in "\u00e9\U0001f600x".encode()]
    assert deltas == ["", "\u00e9", "", "", "", "\U0001f600", "x"]


def test_invalid_bytes_come_as_soon_as_they_cannot_be_completed() -> None:
    stream = TextStream(BYTES)
    assert stream.push([0xE2, 0x82]).text == ""
    assert stream.push([0x41]).text == "\ufffdA"
    assert stream.push([0x80]).text == "\ufffd"
    assert stream.push([0xF0], final=True).text == "\ufffd"


def test_special_tokens_are_skipped_unless_asked() -> None:
    assert BYTES.decode([*b"a", EOS, 257, *b"b"]) == "a<a b>b"
    assert BYTES.decode([*b"a", EOS], skip_special_tokens=False) == "a<|end|>"
    muted = TextStream(BYTES, skip_special_tokens=False).push([*b"a", EOS], final=True, mute_last_token=True)
    assert (muted.text, muted.num_tokens) == ("a", 2)


def test_ids_outside_the_tokenizer_have_no_text() -> None:
    assert BYTES.decode([97, 100_000, 98]) == "ab"


@pytest.mark.parametrize("name", CODECS)
def test_the_decoder_that_is_chosen(name: str) -> None:
    kind = WindowDecoder if name in ("wordpiece", "metaspace") else PieceDecoder
    assert isinstance(CODECS[name].decoder(), kind)


# -- Stop strings --


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Where the first stop begins and ends, by brute force: the first end of any stop, and the longest stop
    that ends there.
    """
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return min(starts), end
    return None


TEXTS = st.text(alphabet="ab\u00e9\U0001f600", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\u00e9\U0001f600", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=500, deadline=None)
@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 60), max_size=20), include=st.booleans())
def test_text_ends_at_the_first_stop(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    ids = spell_utf8(text)
    stream = TextStream(BYTES, stop=stops, include_stop=include)
    streamed, stop, kept = stream_text(stream, chunks_of(ids, cuts))
    found = first_stop(text, stops)
    if found is None:
        assert (streamed, stop, kept) == (text, None, len(ids))
        return
    start, end = found
    assert (streamed, stop) == (text[: end if include else start], text[start:end])
    assert kept == len(text[:end].encode())


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=20),
    stops=STOPS,
    cuts=st.lists(st.integers(0, 20), max_size=10),
    min_tokens=st.integers(0, 20),
)
def test_min_tokens_delays_stops(text: str, stops: list[str], cuts: list[int], min_tokens: int) -> None:
    """Each token is one character here, so a stop must end at character `min_tokens` or later."""
    stream = TextStream(BYTES, stop=stops, min_tokens=min_tokens)
    streamed, _, kept = stream_text(stream, chunks_of(spell_utf8(text), cuts))
    ends = [
        (end, -len(s)) for end in range(1, len(text) + 1) for s in stops
        if end >= min_tokens and text[:end].endswith(s)
    ]  # fmt: skip
    if not ends:
        assert streamed == text
    else:
        end, length = min(ends)
        assert (streamed, kept) == (text[: end + length], end)


@pytest.mark.parametrize("stop", ["b", "bc", "abc", "c"])
def test_single_stop_is_a_split(stop: str) -> None:
    text, found, _ = stream_text(TextStream(BYTES, stop=[stop]), [[i] for i in b"xxabcabc"])
    assert (text, found) == ("xxabcabc".split(stop)[0], stop)


def test_only_a_possible_stop_is_held_back() -> None:
    stream = TextStream(BYTES, stop=["END"])
    assert [stream.push([i]).text for i in b"xENxEND"] == ["x", "", "", "ENx", "", "", ""]
    assert stream.push(b"more").text == "", "no text may follow a stop"


def test_held_text_comes_at_the_end() -> None:
    stream = TextStream(BYTES, stop=["END"])
    assert stream.push(list(b"xEN")).text == "x"
    assert stream.push([], final=True).text == "EN"


def test_stop_inside_a_token_cuts_its_text_and_keeps_the_token() -> None:
    """The golden tokenizer has tokens of several letters, and the stop ends within the first one."""
    codec = CODECS["golden"]
    (token,) = codec.encode("lo")
    delta = TextStream(codec, stop=["l"]).push([token, token])
    assert (delta.text, delta.stop, delta.num_tokens) == ("", "l", 1)


def test_a_stop_completed_by_the_final_replacement_character() -> None:
    text, stop, kept = stream_text(TextStream(BYTES, stop=["\ufffd"]), [[97], [0xE2]])
    assert (text, stop, kept) == ("a", "\ufffd", 2)


# -- Codec --


def test_encode_and_chat() -> None:
    codec = CODECS["golden"]
    assert codec.has_chat_template
    rendered = codec.render_chat([{"role": "user", "content": "hi"}])
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = codec.encode(rendered, add_special_tokens=False)
    assert ids[0] == 1
    assert codec.decode(ids, skip_special_tokens=False) == rendered


def test_special_tokens_are_added_when_asked() -> None:
    """If a tokenizer has a begin token, it comes first, unless the caller does not want it."""
    tokenizer = bytes_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", EOS)]
    )
    codec = TextCodec(tokenizer)
    assert codec.encode("a") == [EOS, 97]
    assert codec.encode("a", add_special_tokens=False) == [97]


def test_chat_without_template_is_invalid() -> None:
    with pytest.raises(InvalidRequest, match="chat: the model has no chat template"):
        BYTES.render_chat([{"role": "user", "content": "hi"}])


def test_chat_template_errors_are_the_callers() -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match=r"chat\.messages: the chat template says: roles must alternate"):
        TextCodec(tokenizer).render_chat([{"role": "user", "content": "hi"}])


def test_no_tokenizer(tmp_path: Path) -> None:
    assert TextCodec.find(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="the tokenizer cannot be loaded"):
        TextCodec.find(tmp_path)


@pytest.mark.parametrize(
    ("places", "counts"),
    [
        (("tokenizer_config.json",), "tokenizer_config.json"),
        (("chat_template.json",), "chat_template.json"),
        (("chat_template.jinja",), "chat_template.jinja"),
        (("tokenizer_config.json", "chat_template.json"), "chat_template.json"),
        (("tokenizer_config.json", "chat_template.jinja"), "chat_template.jinja"),
        (("chat_template.json", "chat_template.jinja"), "chat_template.jinja"),
    ],
)
def test_where_a_chat_template_is_read(tmp_path: Path, places: tuple[str, ...], counts: str) -> None:
    """Each place has a template that writes the place's name."""
    bytes_tokenizer().save_pretrained(tmp_path)
    for place in places:
        file, template = tmp_path / place, f"<{place}>"
        if place.endswith(".jinja"):
            file.write_text(template)
        else:
            data = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps(data | {"chat_template": template}))
    codec = TextCodec.from_pretrained(tmp_path)
    assert codec.has_chat_template
    assert codec.render_chat([{"role": "user", "content": "hi"}]) == f"<{counts}>"


def test_no_token_is_longer_than_max_token_chars() -> None:
    assert BYTES.max_token_chars == len("<|end|>")
    for name in ("golden", "llama2"):
        codec = CODECS[name]
        longest = max(len(codec.decode([i], skip_special_tokens=False)) for i in range(VOCABULARY[name]))
        assert longest <= (codec.max_token_chars or 0)
    assert CODECS["wordpiece"].max_token_chars is None


def test_find_loads() -> None:
    assert TextCodec.find(GOLDEN) is not None


def test_no_prompt_makes_transformers_warn(tmp_path, caplog):
    """transformers warns that "indexing errors" follow if a prompt is longer than the tokenizer's own limit.
    Such prompts are cut or refused before a model reads them, so the warning would mislead.
    """
    tokenizer = bytes_tokenizer()
    tokenizer.model_max_length = 4
    tokenizer.save_pretrained(tmp_path)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        assert len(TextCodec.from_pretrained(tmp_path).encode("a" * 100)) == 100
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_code_of_a_checkpoint_is_never_run(tmp_path, monkeypatch):
    """Nor does transformers ask on the terminal whether it may run it."""
    asked: list[bool | None] = []

    def load(folder, **options):
        asked.append(options.get("trust_remote_code"))
        return bytes_tokenizer()

    monkeypatch.setattr("penstock.runtime.text.by_transformers.AutoTokenizer.from_pretrained", load)
    TextCodec.from_pretrained(tmp_path)
    assert asked == [False]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("special", [False, True])
def test_text_is_encoded_as_transformers_does(name: str, special: bool) -> None:
    """Encoding goes past transformers where that only adds time."""
    for text in ("", "the cat plays.", "\u00e9<|end|>\U0001f600 <a b>", "do not " * 50):
        wanted = WITNESSES[name].encode(text, add_special_tokens=special)
        assert CODECS[name].encode(text, add_special_tokens=special) == wanted


def test_a_tokenizer_that_pads_and_cuts_encodes_all_of_a_text_and_no_more() -> None:
    """Some checkpoints' tokenizer.json has the padding and the truncation of their training."""
    tokenizer = bytes_tokenizer()
    tokenizer.backend_tokenizer.enable_padding(length=16, pad_id=EOS, pad_token="<|end|>")
    tokenizer.backend_tokenizer.enable_truncation(4)
    codec = TextCodec(tokenizer)
    assert codec.encode("ab") == [97, 98]
    assert codec.encode("abcdefgh") == list(b"abcdefgh")


def test_a_tokenizer_that_encodes_in_its_own_way_is_asked() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *args, **kwargs):
            return super()._encode_plus(text.upper(), *args, **kwargs)

    plain = bytes_tokenizer()
    codec = TextCodec(Shouting(tokenizer_object=plain.backend_tokenizer, eos_token="<|end|>"))
    assert codec.encode("ab") == list(b"AB")
