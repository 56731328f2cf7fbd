"""What a model is asked to go on with, its token ids, and what is cut from it to fit the context.

`fit` cuts a prompt that leaves too little room for generation. Nothing is cut silently: a reply tells how
many tokens were cut.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from penstock.runtime.chat.messages import Chat
from penstock.runtime.errors import InvalidRequest, PromptTooLong, UnsupportedFeature, Violation
from penstock.runtime.images.image import Image
from penstock.runtime.images.reader import ImageReader
from penstock.runtime.requests.images import MediaItem, RotaryPositions
from penstock.runtime.requests.request import StoppingParams
from penstock.runtime.text.interface import Text

MOST_CONTEXTS = 8
"""How many contexts long a prompt may be that is to be cut: the server reads all of it to keep a part."""
_SMALL_TOKENS = 65_536
"""Tokens that cost next to nothing to read, so that a prompt may have that many however small the
context is.
"""
_TOKEN_CHARS = 8
"""Characters that are counted for one token; about twice as many as a token of prose has."""


def most_cut_tokens(room: int) -> int:
    """Return the most tokens that a prompt may have which is to be cut to a context of `room` tokens."""
    return max(MOST_CONTEXTS * room, _SMALL_TOKENS)


def most_cut_chars(room: int) -> int:
    """Return the most characters that a text may have which is to be cut to a context of `room` tokens."""
    return most_cut_tokens(room) * _TOKEN_CHARS


class Truncation(enum.Enum):
    """Which tokens of a prompt that is too long are cut."""

    REJECT = "reject"
    """No token is cut: the request is refused."""
    LEFT = "left"
    """The oldest tokens are cut."""
    RIGHT = "right"
    """The newest tokens are cut."""
    MIDDLE = "middle"
    """The tokens between both ends are cut."""


@dataclass(frozen=True, slots=True)
class ContextParams:
    """What a request wants done with a prompt that leaves too little room."""

    truncation: Truncation = Truncation.REJECT
    reserve_tokens: int | None = None
    """Tokens of the context that truncation leaves for generation; None means `max_tokens`, or 1 if that is
    unset.
    """
    cap_max_tokens: bool = False
    """Whether generation is shortened before the prompt is cut. Then 1 token of room is enough, unless more
    is reserved.
    """

    def __post_init__(self) -> None:
        """Take a `Truncation` also by its value, such as "left". InvalidRequest for what is none."""
        try:
            object.__setattr__(self, "truncation", Truncation(self.truncation))
        except ValueError:
            names = ", ".join(member.value for member in Truncation)
            described = f"must be one of {names}, not {self.truncation!r}"
            raise InvalidRequest([Violation("context.truncation", described)]) from None
        if self.reserve_tokens is not None and self.reserve_tokens < 0:
            described = f"must be at least 0, not {self.reserve_tokens}"
            raise InvalidRequest([Violation("context.reserve_tokens", described)])


@dataclass(frozen=True, slots=True)
class Fitted:
    """A prompt that fits its context."""

    token_ids: tuple[int, ...]
    stopping: StoppingParams
    num_truncated: int = 0


def fit(token_ids: tuple[int, ...], context: ContextParams, stopping: StoppingParams, room: int) -> Fitted:
    """Make prompt and generation fit `room` tokens together.

    Raises PromptTooLong if nothing may be cut, and InvalidRequest if the reserve leaves no room for a prompt.
    Without truncation a prompt is too long only if it leaves no room for one token; generation then ends when
    the context is full.
    """
    reserve = context.reserve_tokens
    if reserve is None:
        reserve = 1 if context.cap_max_tokens else stopping.max_tokens or 1
    num_truncated = 0
    if context.truncation is Truncation.REJECT:
        if len(token_ids) > room - 1:
            raise PromptTooLong(len(token_ids), room - 1)
    else:
        most = room - max(reserve, 1)
        if most < 1:
            field = "context.reserve_tokens" if context.reserve_tokens is not None else "stopping.max_tokens"
            described = f"{reserve} tokens for generation leave no room for a prompt: the context has {room}"
            raise InvalidRequest([Violation(field, described)])
        num_truncated = max(len(token_ids) - most, 0)
        token_ids = cut(token_ids, most, context.truncation)
    if context.cap_max_tokens and stopping.max_tokens is not None:
        most = min(stopping.max_tokens, room - len(token_ids))
        stopping = dataclasses.replace(stopping, max_tokens=most, min_tokens=min(stopping.min_tokens, most))
    return Fitted(token_ids, stopping, num_truncated)


def cut(token_ids: tuple[int, ...], most: int, truncation: Truncation) -> tuple[int, ...]:
    """Keep at most `most` tokens. With MIDDLE both halves are kept; if `most` is odd, the newer half has one
    more.
    """
    if len(token_ids) <= most:
        return token_ids
    if truncation is Truncation.LEFT:
        return token_ids[-most:]
    if truncation is Truncation.RIGHT:
        return token_ids[:most]
    return token_ids[: most // 2] + token_ids[len(token_ids) - (most - most // 2) :]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text, which is tokenized as it is."""

    text: str
    images: tuple[Image, ...] = ()
    """One for each place that the text has for an image, such as "<|image_pad|>"."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, which are used as they are."""

    token_ids: tuple[int, ...]
    images: tuple[Image, ...] = ()
    """One for each image token; the engine repeats the token as often as the image needs."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, which the chat template renders."""

    chat: Chat


Prompt: TypeAlias = TextPrompt | ChatPrompt | TokenPrompt


class Encoded(NamedTuple):
    """A prompt as token ids, before anything is cut off."""

    token_ids: tuple[int, ...]
    text: str = ""
    """What a conversation was rendered to; else empty."""
    media: tuple[MediaItem, ...] = ()
    """Its images; `token_ids` has as many tokens for each as it needs."""
    rotary: RotaryPositions | None = None
    """The rotary positions of a prompt with images."""


def encode(
    codec: Text | None,
    prompt: Prompt,
    *,
    room: int,
    cuts: bool,
    add_special_tokens: bool | None = None,
    reader: ImageReader | None = None,
) -> Encoded:
    """Encode a prompt as token ids for a context of `room` tokens. Where `add_special_tokens` is None, texts
    get special tokens and conversations do not, because their template writes its own. `reader` reads
    images; None: the model takes none.

    It takes the longer the longer the prompt is, a tenth of a second for each large image, and up to
    seconds for a conversation with a template of its own. Raises what `check_length` raises, before a long
    text is tokenized, what `ImageReader.place` raises, InvalidRequest where the template refuses the
    conversation, or where a prompt with images is to be cut, and UnsupportedFeature for images without a
    `reader`.
    """
    images = images_of(prompt)
    fields = [field for field, _ in images]
    if images and reader is None:
        raise UnsupportedFeature(fields, "the model reads no images")
    if images and cuts:
        described = "a prompt with images is not cut; leave it out"
        raise InvalidRequest([Violation("context.truncation", described)])
    written_out = reader.written_out if images and reader is not None else str
    encoded = _encode(codec, prompt, written_out, room=room, cuts=cuts, add_special_tokens=add_special_tokens)
    if reader is None:
        return encoded
    where = "chat.messages" if isinstance(prompt, ChatPrompt) else "media"
    placed = reader.place(encoded.token_ids, [image for _, image in images], fields, where, room=room)
    return encoded._replace(token_ids=placed.token_ids, media=placed.media, rotary=placed.rotary)


def images_of(prompt: Prompt) -> list[tuple[str, Image]]:
    """List the images of a prompt in their order, each with the contract's path."""
    if isinstance(prompt, ChatPrompt):
        return prompt.chat.images
    return [(f"media[{i}]", image) for i, image in enumerate(prompt.images)]


def _encode(
    codec: Text | None,
    prompt: Prompt,
    written_out: Callable[[str], str],
    *,
    room: int,
    cuts: bool,
    add_special_tokens: bool | None,
) -> Encoded:
    """Encode the prompt with one token for each image. written_out: see `ImageReader.written_out`."""
    if isinstance(prompt, TokenPrompt):
        return Encoded(prompt.token_ids)
    assert codec is not None, "prompts of text are refused where there is no tokenizer"
    if isinstance(prompt, ChatPrompt):
        text, special = codec.render_chat(prompt.chat), bool(add_special_tokens)
    else:
        text, special = prompt.text, add_special_tokens is not False
    text = written_out(text)
    check_length(prompt, text, codec.max_token_chars, room=room, cuts=cuts)
    token_ids = tuple(codec.encode(text, add_special_tokens=special))
    return Encoded(token_ids, text if isinstance(prompt, ChatPrompt) else "")


def check_length(prompt: Prompt, text: str, most_token_chars: int | None, *, room: int, cuts: bool) -> None:
    """Refuse a text that is too long whatever its tokens are, so that megabytes are not tokenized only to
    learn that. `most_token_chars` is the length of the longest token, None where it is not known.

    Raises PromptTooLong where `room` tokens cannot hold the text. With `cuts` a longer prompt will be cut, so
    the text is refused only where it is longer than anybody would read to keep a small part of it:
    InvalidRequest.
    """
    if not cuts:
        if most_token_chars is not None and len(text) > room * most_token_chars:
            raise PromptTooLong(-(-len(text) // most_token_chars), room - 1)
        return
    most = most_cut_chars(room)
    if len(text) > most:
        described = f"at most {most} characters, also of a prompt to be cut, not {len(text)}"
        field = "chat" if isinstance(prompt, ChatPrompt) else "prompt"
        raise InvalidRequest([Violation(field, described)])
