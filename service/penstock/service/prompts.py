"""A request's texts to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from penstock.runtime.chat.messages import Chat
from penstock.runtime.errors import PromptTooLong
from penstock.runtime.grammar.bad_words import bad_word_ids
from penstock.runtime.text import TextCodec
from penstock.service.convert import ChatPrompt, Prompt, TokenPrompt
from penstock.service.lanes import Lanes

T = TypeVar("T")
INLINE_CHARS = 2000
"""Shorter texts are tokenized on the event loop (well under a millisecond); a hop to a thread costs more."""
LONG_CHARS = 500_000
"""Longer ones, which only come here to be cut, take seconds."""
_CALL_CHARS = 100
"""What a call of the tokenizer costs, in characters of a long text."""


class Encoded(NamedTuple):
    """A prompt as the model sees it, before anything is cut off."""

    token_ids: tuple[int, ...]
    text: str = ""
    """What a chat was rendered to; else empty."""


async def encode_prompt(
    codec: TextCodec | None,
    prompt: Prompt,
    lanes: Lanes,
    *,
    max_tokens: int | None,
    add_special_tokens: bool | None = None,
) -> Encoded:
    """Token ids of a prompt; chats and long texts are encoded in a thread. None adds special tokens to text,
    none to chats.

    `max_tokens` None takes a prompt of any length. Else raises PromptTooLong for text that cannot have so few
    whatever its tokens are: megabytes are not tokenized to learn that.
    """
    if isinstance(prompt, TokenPrompt):
        return Encoded(prompt.token_ids)
    assert codec is not None, "conversion refuses text where there is no tokenizer"
    most = codec.max_token_chars

    def encode(text: str, special: bool) -> tuple[int, ...]:
        if most is not None and max_tokens is not None and len(text) > (max_tokens + 1) * most:
            raise PromptTooLong(-(-len(text) // most), max_tokens)
        return tuple(codec.encode(text, add_special_tokens=special))

    def encode_chat(chat: Chat) -> Encoded:
        text = codec.render_chat(chat)
        return Encoded(encode(text, bool(add_special_tokens)), text)  # the template writes its own

    if isinstance(prompt, ChatPrompt):
        chat = prompt.chat
        if chat.template is not None:
            return await lanes.template(partial(encode_chat, chat))
        num_chars = sum(len(turn.content) for turn in chat.messages)
        return await _in_thread(partial(encode_chat, chat), num_chars, lanes)
    text, special = prompt.text, add_special_tokens is not False
    if len(text) <= INLINE_CHARS:
        return Encoded(encode(text, special))
    return Encoded(await _in_thread(partial(encode, text, special), len(text), lanes))


async def _in_thread(work: Callable[[], T], num_chars: int, lanes: Lanes) -> T:
    return await (asyncio.to_thread(work) if num_chars <= LONG_CHARS else lanes.heavy(work))


async def encode_words(
    codec: TextCodec | None, words: Sequence[str], lanes: Lanes
) -> tuple[tuple[int, ...], ...]:
    """Token ids of words that are forbidden, in all their spellings; many of them are encoded in a thread."""
    if not words:
        return ()
    assert codec is not None, "conversion refuses words where there is no tokenizer"
    if sum(len(word) + _CALL_CHARS for word in words) <= INLINE_CHARS:
        return bad_word_ids(codec, words)
    return await lanes.heavy(partial(bad_word_ids, codec, words))
