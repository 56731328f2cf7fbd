"""Which tokens end a turn, by tokenizers and chat templates as checkpoints have them."""

from __future__ import annotations

import json

import pytest

from penstock.runtime.loading.served_model import end_tokens
from penstock.runtime.text.codec import TextCodec
from tests.runtime.chat.test_model_templates import TEMPLATES
from tests.support.chat import LLAMA3, MISTRAL, bytes_tokenizer
from tests.support.goldens import GOLDEN

TOKENS = [
    "<|im_start|>", "<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<turn|>", "<|user|>", "[e~[",
    "<|end_of_text|>", "<seed:eos>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "</s>[",
]  # fmt: skip


def ends(template: str | dict[str, str] | None) -> set[str]:
    """Return the end tokens, of which `<|end|>` is the tokenizer's own."""
    codec = TextCodec(bytes_tokenizer(special=TOKENS, chat_template=template))
    names = {i: token for token, i in codec.added_tokens.items()}
    return {names[i] for i in codec.end_token_ids}


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("qwen3_coder", "<|im_end|>"),
        ("olmo3", "<|im_end|>"),
        ("gemma3", "<end_of_turn>"),
        ("gemma4", "<turn|>"),
        ("granite_3", "<|end_of_text|>"),
        ("granite_4", "<|end_of_text|>"),
        ("phi_4_mini", "<|end|>"),
        ("minimax_m2", "[e~["),
        ("seed_oss", "<seed:eos>"),
        ("ministral_3", "</s>"),
        ("smollm3", "<|im_end|>"),
        ("glm_4_6", "<|end|>"),  # a turn has no end of its own here: generation_config.json has <|user|>
    ],
)
def test_the_template_shows_what_ends_a_turn(name: str, end: str) -> None:
    assert ends((TEMPLATES / f"{name}.jinja").read_text()) == {"<|end|>", end}


def test_a_turn_in_harmony_ends_with_an_answer_or_a_call() -> None:
    """Not with the end of any message: `<|end|>` is an end token here only because it is the tokenizer's."""
    assert ends((TEMPLATES / "gpt_oss.jinja").read_text()) == {"<|end|>", "<|return|>", "<|call|>"}
    assert ends("<|channel|><|message|>{{ messages[1].content }}<|im_end|>") >= {"<|return|>", "<|call|>"}
    assert "<|im_end|>" not in ends("<|channel|><|message|>{{ messages[1].content }}<|im_end|>")


def test_what_a_checkpoint_says_of_its_tokenizer() -> None:
    folder = GOLDEN / "qwen3"
    told = json.loads((folder / "tokenizer_config.json").read_text())
    codec = TextCodec.from_pretrained(folder)
    assert codec.special_tokens == {name: told[name] for name in ("eos_token", "pad_token")}
    assert codec.default_template == (folder / "chat_template.jinja").read_text()
    assert codec.tokenizer_class == told["tokenizer_class"]
    several = {"tool_use": "a", "default": "b"}
    assert TextCodec(bytes_tokenizer(special=TOKENS, chat_template=several)).default_template == "b"


def test_templates_in_the_style_of_others() -> None:
    assert ends(LLAMA3) == {"<|end|>", "<|eot_id|>"}
    assert ends(MISTRAL) == {"<|end|>", "</s>"}
    assert ends({"default": LLAMA3, "tool_use": MISTRAL}) == {"<|end|>", "<|eot_id|>"}


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content }}",  # what the assistant said is not shown
        "{% for m in messages %}{{ m.content }}\n<|im_end|>{% endfor %}",  # not directly after it
        "{{ messages[1].content }}<b>",  # no token
    ],
)
def test_nothing_is_taken_for_an_end_that_is_none(template: str | None) -> None:
    assert ends(template) == {"<|end|>"}


def test_the_longest_token_counts() -> None:
    assert ends("{{ messages[1].content }}</s>[INST]") == {"<|end|>", "</s>["}


def test_end_tokens_of_a_model() -> None:
    """Those of the configuration come first, and what lies beyond the vocabulary cannot be written."""
    codec = TextCodec(bytes_tokenizer(special=TOKENS, chat_template=LLAMA3))
    end, eot = codec.added_tokens["<|end|>"], codec.added_tokens["<|eot_id|>"]
    assert end_tokens((7, 2), codec, eot + 1) == (7, 2, end, eot)
    assert end_tokens((eot,), codec, eot + 1) == (eot, end)
    assert end_tokens((7,), codec, eot) == (7, end)
    assert end_tokens((7,), None, 300) == (7,)
