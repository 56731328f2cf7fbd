"""Turns a request's texts into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from penstock.runtime.chat.messages import Chat
from penstock.runtime.generation.preparing import word_ids
from penstock.runtime.generation.prompts import (
    ChatPrompt,
    Encoded,
    Prompt,
    TokenPrompt,
    check_length,
    encode,
    images_of,
)
from penstock.runtime.media.reader import ImageReader
from penstock.runtime.text.interface import Text
from penstock.service.threads.lanes import MESSAGE_BYTES, Lanes

INLINE_CHARS = 2000
"""Shorter texts are tokenized on the event loop, in well under a millisecond; a hop to a thread
costs more.
"""
_ID_COST = 1
"""The cost of looking at one token id, in bytes of a message."""
_CALL_CHARS = 100
"""The cost of one call of the tokenizer, and of one part of a chat, in characters of a long text."""


async def encode_prompt(
    codec: Text | None,
    prompt: Prompt,
    lanes: Lanes,
    *,
    room: int,
    cuts: bool = False,
    add_special_tokens: bool | None = None,
    reader: ImageReader | None = None,
) -> Encoded:
    """Token ids of a prompt for a context of `room` tokens. Chats, long texts and prompts with images are
    encoded in a thread. If `add_special_tokens` is None, they are added to text, and not to chats. `reader`
    reads the images; None: the model reads none.

    Megabytes are not tokenized just to learn that they are too long. Raises PromptTooLong for a text that
    leaves no room for one more token, whatever its tokens are. With `cuts` a longer prompt will be cut; then
    InvalidRequest says that it is too long to read just to keep a small part of it.
    """
    work = partial(
        encode, codec, prompt, room=room, cuts=cuts, add_special_tokens=add_special_tokens, reader=reader
    )
    if images := images_of(prompt):
        return await lanes.images(work, len(images), MESSAGE_BYTES.get())
    if isinstance(prompt, TokenPrompt):
        # With a reader they are searched for the places of images.
        return work() if reader is None else await lanes.convert(work, _ID_COST * len(prompt.token_ids))
    if isinstance(prompt, ChatPrompt):
        if prompt.chat.template is not None:
            return await lanes.template(work)
        return await lanes.text(work, chat_weight(prompt.chat))
    text = prompt.text
    if len(text) <= INLINE_CHARS:
        return work()
    assert codec is not None, "conversion refuses text where there is no tokenizer"
    # checked before it waits for a thread
    check_length(prompt, text, codec.max_token_chars, room=room, cuts=cuts)
    return await lanes.text(work, len(text))


def chat_weight(chat: Chat) -> int:
    """The cost of rendering and tokenizing a chat, in characters of a text.

    All of it may become part of the prompt, not only the turns: tools, the arguments of calls, and the
    template's options. So it is the size of the message that brought it, and something for each of its parts.
    """
    num_calls = sum(len(turn.tool_calls) for turn in chat.messages)
    return MESSAGE_BYTES.get() + _CALL_CHARS * (1 + len(chat.messages) + len(chat.tools) + num_calls)


async def encode_words(codec: Text | None, words: Sequence[str], lanes: Lanes) -> tuple[tuple[int, ...], ...]:
    """Token ids of bad words, in all their spellings. Many of them are encoded in a thread."""
    work = partial(word_ids, codec, words)
    num_chars = sum(len(word) + _CALL_CHARS for word in words)
    return work() if num_chars <= INLINE_CHARS else await lanes.text(work, num_chars)
