"""A request's texts to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from penstock.runtime.chat.messages import Chat
from penstock.runtime.errors import InvalidRequest, PromptTooLong, Violation
from penstock.runtime.grammar.bad_words import bad_word_ids
from penstock.runtime.text.codec import TextCodec
from penstock.service.requests.context import most_cut_chars
from penstock.service.requests.convert import Prompt, TokenPrompt
from penstock.service.requests.convert_chat import ChatPrompt
from penstock.service.threads.lanes import MESSAGE_BYTES, Lanes

INLINE_CHARS = 2000
"""Shorter texts are tokenized on the event loop (well under a millisecond); a hop to a thread costs more."""
_CALL_CHARS = 100
"""What a call of the tokenizer costs, and a part of a chat, in characters of a long text."""


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
    room: int,
    cuts: bool = False,
    add_special_tokens: bool | None = None,
) -> Encoded:
    """Token ids of a prompt for a context of `room` tokens; chats and long texts are encoded in a thread.
    None adds special tokens to text, none to chats.

    Megabytes are not tokenized to learn that they are too long. Raises PromptTooLong for text that leaves no
    room for one more token whatever its tokens are. With `cuts` a longer prompt is taken to be cut, and then
    InvalidRequest says that it is longer than anybody would read to keep a small part of it.
    """
    if isinstance(prompt, TokenPrompt):
        return Encoded(prompt.token_ids)
    assert codec is not None, "conversion refuses text where there is no tokenizer"
    field = "chat" if isinstance(prompt, ChatPrompt) else "prompt"

    def encode(text: str, special: bool) -> tuple[int, ...]:
        _check_length(text, room, codec.max_token_chars, field if cuts else None)
        return tuple(codec.encode(text, add_special_tokens=special))

    def encode_chat(chat: Chat) -> Encoded:
        text = codec.render_chat(chat)
        return Encoded(encode(text, bool(add_special_tokens)), text)  # the template writes its own

    if isinstance(prompt, ChatPrompt):
        chat = prompt.chat
        work = partial(encode_chat, chat)
        if chat.template is not None:
            return await lanes.template(work)
        return await lanes.text(work, chat_weight(chat))
    text, special = prompt.text, add_special_tokens is not False
    if len(text) <= INLINE_CHARS:
        return Encoded(encode(text, special))
    _check_length(text, room, codec.max_token_chars, field if cuts else None)  # before it waits for a thread
    return Encoded(await lanes.text(partial(encode, text, special), len(text)))


def chat_weight(chat: Chat) -> int:
    """What a chat costs to be rendered and tokenized, in characters of a text.

    All of it may become part of the prompt, not the turns alone: tools, the arguments of calls and what the
    template is told. So it is the size of the message that brought it, and something for each of its parts.
    """
    num_calls = sum(len(turn.tool_calls) for turn in chat.messages)
    return MESSAGE_BYTES.get() + _CALL_CHARS * (1 + len(chat.messages) + len(chat.tools) + num_calls)


def _check_length(text: str, room: int, most_token_chars: int | None, cut_field: str | None) -> None:
    """Raises where a text is certainly too long, or, where it may be cut, too long to be read for that."""
    if cut_field is None:
        if most_token_chars is not None and len(text) > room * most_token_chars:
            raise PromptTooLong(-(-len(text) // most_token_chars), room - 1)
        return
    most = most_cut_chars(room)
    if len(text) > most:
        described = f"at most {most} characters, also of a prompt to be cut, not {len(text)}"
        raise InvalidRequest([Violation(cut_field, described)])


async def encode_words(
    codec: TextCodec | None, words: Sequence[str], lanes: Lanes
) -> tuple[tuple[int, ...], ...]:
    """Token ids of words that are forbidden, in all their spellings; many of them are encoded in a thread."""
    if not words:
        return ()
    assert codec is not None, "conversion refuses words where there is no tokenizer"
    num_chars = sum(len(word) + _CALL_CHARS for word in words)
    if num_chars <= INLINE_CHARS:
        return bad_word_ids(codec, words)
    return await lanes.text(partial(bad_word_ids, codec, words), num_chars)
