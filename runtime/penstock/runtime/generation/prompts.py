"""What a model is asked to go on with, and its token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from penstock.runtime.chat.messages import Chat
from penstock.runtime.errors import InvalidRequest, PromptTooLong, UnsupportedFeature, Violation
from penstock.runtime.media.image import Image
from penstock.runtime.media.reader import ImageReader
from penstock.runtime.requests.context import most_cut_chars
from penstock.runtime.requests.media import MediaItem, RotaryPositions
from penstock.runtime.text.interface import Text


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text, which is tokenized as it is."""

    text: str
    images: tuple[Image, ...] = ()
    """One for each place that the text has for a picture, such as "<|image_pad|>"."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, which are used as they are."""

    token_ids: tuple[int, ...]
    images: tuple[Image, ...] = ()
    """One for each image token; the engine repeats the token as often as the picture needs."""


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
    """Its pictures; `token_ids` has as many tokens for each as it needs."""
    rotary: RotaryPositions | None = None
    """The rotary positions of a prompt with pictures."""


def encode(
    codec: Text | None,
    prompt: Prompt,
    *,
    room: int,
    cuts: bool,
    add_special_tokens: bool | None = None,
    reader: ImageReader | None = None,
) -> Encoded:
    """The token ids of a prompt for a context of `room` tokens. Where `add_special_tokens` is None, texts get
    special tokens and conversations do not, because their template writes its own. `reader` reads pictures;
    None: the model takes none.

    It takes the longer the longer the prompt is, a tenth of a second for each large picture, and up to
    seconds for a conversation with a template of its own. Raises what `check_length` raises, before a long
    text is tokenized, what `ImageReader.place` raises, InvalidRequest where the template refuses the
    conversation, or where a prompt with pictures is to be cut, and UnsupportedFeature for pictures without a
    `reader`.
    """
    images = images_of(prompt)
    fields = [field for field, _ in images]
    if images and reader is None:
        raise UnsupportedFeature(fields, "the model reads no images")
    if images and cuts:
        described = "a prompt with images is not cut; leave it out"
        raise InvalidRequest([Violation("context.truncation", described)])
    encoded = _encode(codec, prompt, room=room, cuts=cuts, add_special_tokens=add_special_tokens)
    if reader is None:
        return encoded
    where = "chat.messages" if isinstance(prompt, ChatPrompt) else "media"
    placed = reader.place(encoded.token_ids, [image for _, image in images], fields, where, room=room)
    return encoded._replace(token_ids=placed.token_ids, media=placed.media, rotary=placed.rotary)


def images_of(prompt: Prompt) -> list[tuple[str, Image]]:
    """The pictures of a prompt in their order, each with the contract's path."""
    if isinstance(prompt, ChatPrompt):
        return prompt.chat.images
    return [(f"media[{i}]", image) for i, image in enumerate(prompt.images)]


def _encode(
    codec: Text | None, prompt: Prompt, *, room: int, cuts: bool, add_special_tokens: bool | None
) -> Encoded:
    """The prompt with one token for each picture."""
    if isinstance(prompt, TokenPrompt):
        return Encoded(prompt.token_ids)
    assert codec is not None, "prompts of text are refused where there is no tokenizer"
    if isinstance(prompt, ChatPrompt):
        text, special = codec.render_chat(prompt.chat), bool(add_special_tokens)
    else:
        text, special = prompt.text, add_special_tokens is not False
    check_length(prompt, text, codec.max_token_chars, room=room, cuts=cuts)
    token_ids = tuple(codec.encode(text, add_special_tokens=special))
    return Encoded(token_ids, text if isinstance(prompt, ChatPrompt) else "")


def check_length(prompt: Prompt, text: str, most_token_chars: int | None, *, room: int, cuts: bool) -> None:
    """Refuses a text that is too long whatever its tokens are, so that megabytes are not tokenized only to
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
