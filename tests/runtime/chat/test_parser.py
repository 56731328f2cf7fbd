"""How the forms are chosen, from the model or by options, and how whole outputs pass through both parsers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from penstock.runtime.chat.messages import Chat, ChatTurn, Tool
from penstock.runtime.chat.parser import ChatForms, choose_forms, detect
from penstock.runtime.chat.reasoning import REASONING_FORMS
from penstock.runtime.chat.tool_formats.events import CallPiece as Call
from penstock.runtime.chat.tool_formats.events import Parsed, joined
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS
from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.hub import DEMO_DIRECTORY
from penstock.runtime.text.assembler import TextStream
from penstock.runtime.text.codec import TextCodec
from tests.support.chat import LLAMA3, MISTRAL, QWEN, R1, bytes_tokenizer, pieces_of

USER = (ChatTurn("user", "hi"),)
WEATHER = Chat(USER, (Tool("get_weather"),))
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def names(forms: ChatForms) -> tuple[str | None, str | None]:
    if forms.is_harmony:
        return "harmony", "harmony"
    tools = forms.tools.name if forms.tools is not None else None
    return tools, forms.reasoning.name if forms.reasoning is not None else None


def forms_of(tools: str | None, reasoning: str | None) -> ChatForms:
    return ChatForms(TOOL_FORMS[tools] if tools else None, REASONING_FORMS[reasoning] if reasoning else None)


def parse(forms: ChatForms, chat: Chat, prompt: str, pieces: list[str]) -> Parsed:
    parser = forms.parser(chat, prompt)
    parts = [*map(parser.push, pieces), parser.flush()]
    return Parsed(
        "".join(p.text for p in parts),
        "".join(p.reasoning for p in parts),
        tuple(joined([call for p in parts for call in p.calls])),
    )


@pytest.mark.parametrize(
    ("template", "added_tokens", "expected"),
    [
        (QWEN, (), ("hermes", "think")),
        (LLAMA3, ("<|python_tag|>", "<|eot_id|>"), ("llama3_json", None)),
        (MISTRAL, ("[TOOL_CALLS]",), ("mistral", None)),
        (R1, ("<think>", "</think>"), (None, "think")),
        ("{{ tools }}", ("[TOOL_CALLS]", "<s>"), ("mistral", None)),
        ("{{ tools }}", ("<|tool_call_start|>",), ("pythonic", None)),
        ("{{ tools }}", ("<tool_call>", "<think>"), ("hermes", None)),
        ("{{ tools }} <|python_start|>", (), ("pythonic", None)),
        ("{{ messages }}", ("<tool_call>", "<think>"), (None, None)),  # neither tools nor reasoning
        ("<seed:think>", (), (None, "seed")),
        ("[THINK][TOOL_CALLS]", (), ("mistral", "magistral")),
        ('{{ tools }}"<|channel|>final<|message|>"', (), ("harmony", "harmony")),
        ("<|channel>thought", (), (None, "gemma4")),  # not Harmony's marker
        ("", ("<tool_call>",), (None, None)),
    ],
)
def test_detection(
    template: str, added_tokens: tuple[str, ...], expected: tuple[str | None, str | None]
) -> None:
    assert names(detect(template, added_tokens)) == expected


def test_the_demo_model_is_hermes() -> None:
    codec = TextCodec.from_pretrained(DEMO_DIRECTORY)
    assert names(detect(codec.chat_template, codec.added_tokens)) == ("hermes", None)


def test_options_override_what_the_model_shows() -> None:
    assert names(choose_forms(QWEN)) == ("hermes", "think")
    assert names(choose_forms(QWEN, tools="none")) == (None, "think")
    assert names(choose_forms(QWEN, reasoning="none")) == ("hermes", None)
    assert names(choose_forms("", tools="pythonic", reasoning="seed")) == ("pythonic", "seed")
    with pytest.raises(
        ConfigError, match=r"^tool_call_parser: must be one of auto, none, hermes, .*, not 'x'"
    ):
        choose_forms(QWEN, tools="x")
    with pytest.raises(
        ConfigError, match=r"^reasoning_parser: must be one of auto, none, think, .*, not 'x'"
    ):
        choose_forms(QWEN, reasoning="x")


def test_harmony_is_chosen_for_both_or_for_neither() -> None:
    shown = "<|channel|>final<|message|>"
    for template, options in (
        (shown, {}),
        (shown, {"tools": "harmony"}),
        ("", {"reasoning": "harmony"}),
        (QWEN, {"tools": "harmony", "reasoning": "harmony"}),
    ):
        assert choose_forms(template, **options) == ChatForms(is_harmony=True)
    assert choose_forms(shown, tools="none", reasoning="none") == ChatForms()
    assert names(choose_forms(shown, tools="hermes", reasoning="think")) == ("hermes", "think")
    for template, options in (
        (shown, {"tools": "none"}),
        (shown, {"reasoning": "think"}),
        ("", {"tools": "hermes", "reasoning": "harmony"}),
    ):
        with pytest.raises(ConfigError, match=r"^reasoning_parser: the model writes Harmony, .* or neither"):
            choose_forms(template, **options)


def test_reasoning_words_and_calls() -> None:
    text = f"<think>\nParis: {CALL}\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
    call = Call("get_weather", '{"city": "Paris"}')
    expected = Parsed("Let me see.", f"Paris: {CALL}", (call, call))  # no call within the reasoning
    forms = forms_of("hermes", "think")
    assert parse(forms, WEATHER, "<|assistant|>", [text]) == expected
    assert parse(forms, WEATHER, "<|assistant|>", list(text)) == expected
    inside = text.removeprefix("<think>")
    assert parse(forms, WEATHER, "<|assistant|><think>\n", list(inside)) == expected


def test_each_piece_gives_what_is_new() -> None:
    parser = forms_of("hermes", "think").parser(WEATHER, "")
    pieces = ["<think>", "so", " it is", "</think>", "\n", "Well", ".\n<tool", CALL.removeprefix("<tool")]
    assert [parser.push(piece) for piece in pieces] == [
        Parsed(),
        Parsed(reasoning="so"),
        Parsed(reasoning=" it is"),
        Parsed(),
        Parsed(),
        Parsed("Well"),
        Parsed("."),
        Parsed(calls=(Call("get_weather", '{"city": "Paris"}'),)),
    ]
    assert parser.flush() == Parsed()


@pytest.mark.parametrize("chat", [Chat(USER), Chat(USER, (Tool("get_weather"),), "none")])
def test_calls_are_text_if_no_tools_were_offered(chat: Chat) -> None:
    forms = forms_of("hermes", "think")
    assert parse(forms, chat, "", [CALL]) == Parsed(CALL)
    assert forms.markers(chat) == {"<think>", "</think>"}


def test_without_forms_everything_is_text() -> None:
    parser = ChatForms().parser(WEATHER, "<think>")
    assert [parser.push("<think>"), parser.push(""), parser.flush()] == [
        Parsed("<think>"),
        Parsed(),
        Parsed(),
    ]
    assert ChatForms().markers(WEATHER) == frozenset()


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([CALL, "<think>", "</think>", "<tool_call>", "\n", " ", "words", "<", "</t"]),
        max_size=10,
    ),
    opened=st.booleans(),
    cuts=st.lists(st.integers(0, 300), max_size=10),
)
def test_pieces_do_not_matter(parts, opened, cuts) -> None:
    text, prompt = "".join(parts), "<think>" if opened else ""
    forms = forms_of("hermes", "think")
    whole = parse(forms, WEATHER, prompt, [text])
    assert parse(forms, WEATHER, prompt, pieces_of(text, cuts)) == whole
    assert parse(forms, WEATHER, prompt, list(text)) == whole


# -- Special tokens that the parser must see --


def test_markers_stay_visible_if_special_tokens_are_skipped() -> None:
    codec = TextCodec(bytes_tokenizer(special=["[TOOL_CALLS]", "[ARGS]", "<other>"], ordinary=["<n>"]))
    text = '[TOOL_CALLS]get_weather[ARGS]{"a": 1}<other><n>'
    ids = [*codec.encode(text), codec.encode("<|end|>")[0]]
    assert codec.decode(ids) == 'get_weather{"a": 1}<n>'
    forms = forms_of("mistral", None)
    for step in (1, len(ids)):
        stream = TextStream(codec, visible=forms.markers(WEATHER))
        shown = [stream.push(ids[i : i + step]).text for i in range(0, len(ids), step)]
        assert "".join(shown) == '[TOOL_CALLS]get_weather[ARGS]{"a": 1}<n>'
        assert parse(forms, WEATHER, "", shown) == Parsed("<n>", calls=(Call("get_weather", '{"a": 1}'),))
    visible = codec.decoder(skip_special_tokens=False, visible=frozenset(["<other>"]))
    assert visible.push(ids) + visible.flush() == text + "<|end|>"


def test_markers_stay_visible_under_any_decoder() -> None:
    """WordPiece is a decoder whose output for a token depends on its neighbours."""
    tokenizer = Tokenizer(
        models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "[SEP]": 3}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(["[SEP]"])
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]"))
    hidden, shown = codec.decoder(), codec.decoder(visible=frozenset(["[SEP]"]))
    ids = [1, 2, 3, 0, 1]
    assert hidden.push(ids) + hidden.flush() == "playing play"
    assert shown.push(ids) + shown.flush() == "playing [SEP] play"
