"""Fits prompts into the context: what is cut from a prompt that leaves too little room for generation.

Nothing is cut silently: a reply tells how many tokens were cut.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from penstock.runtime.errors import InvalidRequest, PromptTooLong, Violation
from penstock.runtime.requests.request import StoppingParams

MOST_CONTEXTS = 8
"""How many contexts long a prompt may be that is to be cut: the server reads all of it to keep a part."""
_SMALL_TOKENS = 65_536
"""Tokens that cost next to nothing to read, so that a prompt may have that many however small the
context is.
"""
_TOKEN_CHARS = 8
"""Characters that are counted for one token; about twice as many as a token of prose has."""


def most_cut_tokens(room: int) -> int:
    """The most tokens that a prompt may have which is to be cut to a context of `room` tokens."""
    return max(MOST_CONTEXTS * room, _SMALL_TOKENS)


def most_cut_chars(room: int) -> int:
    """The most characters that a text may have which is to be cut to a context of `room` tokens."""
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
        """Takes a `Truncation` also by its value, such as "left". InvalidRequest for what is none."""
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
