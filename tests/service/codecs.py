"""Tokenizers whose tokens are bytes, so that every id and every text can be written down by hand."""

from __future__ import annotations

import threading

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from penstock.runtime.text.codec import TextCodec
from penstock.service.requests import generate
from tests.support.models.byte_text import CHAT_TEMPLATE, END, EOS, byte_tokenizer

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens 257 to 260 of `qwen_codec`."""
THINK, END_THINK, CALL, END_CALL = range(257, 261)
QWEN_VOCAB = 264
QWEN_TEMPLATE = (
    "{% if tools %}T{% for t in tools %}:{{ t.function.name }}{% endfor %}|{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}#{{ c.id }}</tool_call>{% endfor %}"
    "{% if m.role == 'tool' %}={{ m.name }}#{{ m.tool_call_id }}{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}{% if thinking %}<think>{% endif %}"
)
"""Qwen's template, much shortened: tools, calls, results of tools, and thinking by option."""
HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
"""Tokens 257 to 262 of `harmony_codec`, whose end tokens are 256, `<|return|>`, and the last of these."""
HARMONY_ENDS = (EOS, 262)
HARMONY_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}|{% endfor %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}|{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>"
    "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}{{ m.thinking }}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}<|start|>assistant{# <|channel|> #}"
)
"""gpt-oss' template, much shortened."""


def slow_codec(monkeypatch: pytest.MonkeyPatch) -> tuple[TextCodec, threading.Event, list[str]]:
    """Make a byte codec that waits before it encodes, the event that lets it go on, and the texts that it got
    so far. Even short texts are encoded in a thread then.
    """
    monkeypatch.setattr(generate, "INLINE_CHARS", 0)
    gate = threading.Event()
    encoding: list[str] = []
    codec = byte_codec()
    encode = codec.encode

    def waits(text: str, *, add_special_tokens: bool) -> list[int]:
        encoding.append(text)
        assert gate.wait(20)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(codec, "encode", waits)
    return codec, gate, encoding


def byte_codec(
    chat_template: str | None = CHAT_TEMPLATE, markers: tuple[str, ...] = (), end: str = END
) -> TextCodec:
    """Make a codec in which token b is the byte b, 256 is the special end token, and then come `markers`,
    which are special, too.
    """
    tokenizer = byte_tokenizer(end, markers)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    fast.chat_template = chat_template
    return TextCodec(fast)


SPACE, THE, A = 258, 263, 261
"""Tokens of `llama2_codec`: U+2581, "\u2581the" and "\u2581a"."""
LLAMA2_VOCAB = 272


def llama2_codec() -> TextCodec:
    """Make a codec of Llama 2's kind, as Mistral's and Phi 3's are, too: U+2581 is a space and is put before
    each text, and the decoder strips one space from the beginning. The first 256 tokens are bytes, and 256 is
    the special end token.
    """
    words = ["</s>", "<s>", "\u2581", "a", "b", "\u2581a", "\u2581b", "\u2581the", *"the", "th", "the"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {w: 256 + i for i, w in enumerate(words)}
    merges = [("\u2581", "a"), ("\u2581", "b"), ("t", "h"), ("th", "e"), ("\u2581", "the")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["</s>", "<s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return TextCodec(fast)


def qwen_codec() -> TextCodec:
    """Make a codec of bytes and of the markers of Qwen's reasoning and tool calls."""
    return byte_codec(QWEN_TEMPLATE, MARKERS)


def harmony_codec() -> TextCodec:
    """Make a codec of bytes and of the markers of gpt-oss."""
    return byte_codec(HARMONY_TEMPLATE, HARMONY_MARKERS, "<|return|>")
