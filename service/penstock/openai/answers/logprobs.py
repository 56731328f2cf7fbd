"""Log-probabilities in OpenAI's shapes, and in vLLM's for prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.client import Logprobs, Vocabulary

LEAST = -9999.0
"""What OpenAI's API tells for a token that can hardly come; JSON has no infinity."""

Top = Sequence[tuple[int, float]]


def chat_logprobs(
    logprobs: Logprobs, token_ids: Sequence[int], vocabulary: Vocabulary
) -> list[dict[str, Any]]:
    """The entries of `logprobs.content` of a chat, one for each token."""
    return [
        {
            **_entry(token_id, logprob, vocabulary),
            "top_logprobs": [_entry(candidate, value, vocabulary) for candidate, value in top],
        }
        for token_id, logprob, top in _places(logprobs, token_ids)
    ]


def completion_logprobs(
    logprobs: Logprobs,
    token_ids: Sequence[int],
    vocabulary: Vocabulary,
    text_offset: int,
    *,
    start: int = 0,
    prompt: str | None = None,
) -> tuple[dict[str, Any], int]:
    """The `logprobs` of a completion's choice, and where in the text the next token begins. `text_offset` is
    where the first of these tokens begins, and `start` where the output or the prompt begins that they are
    of. The token itself is among the likeliest in any case, as in OpenAI's API.

    The tokens of a prompt go with its text. The first of them has no log-probability, so it has null.
    """
    made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, logprob, top in _places(logprobs, token_ids):
        name = _legacy_name(token_id, vocabulary)
        made["tokens"].append(name)
        made["text_offset"].append(text_offset if prompt is None else min(text_offset, len(prompt)))
        dropped = vocabulary.dropped_leading_spaces if text_offset == start else 0
        if (
            prompt is not None
            and token_id in vocabulary.special_token_ids
            and prompt.startswith(name, text_offset)
        ):
            text_offset += len(name)
        else:
            text_offset += _num_characters(token_id, vocabulary, dropped)
        if prompt is not None and math.isnan(logprob):
            made["token_logprobs"].append(None)
            made["top_logprobs"].append(None)
            continue
        likeliest: dict[str, float] = {}
        for candidate, value in top:
            likeliest.setdefault(_legacy_name(candidate, vocabulary), _finite(value))
        likeliest.setdefault(name, _finite(logprob))
        made["token_logprobs"].append(_finite(logprob))
        made["top_logprobs"].append(likeliest)
    return made, text_offset


def prompt_logprobs(
    logprobs: Logprobs, token_ids: Sequence[int], vocabulary: Vocabulary
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt but the first, from an id to its log-probability
    and rank. The rank is null of a token that is not among the likeliest that were asked for.
    """
    made: list[dict[str, Any] | None] = []
    for token_id, logprob, top in _places(logprobs, token_ids):
        if math.isnan(logprob):
            made.append(None)
            continue
        entries = {str(token_id): _prompt_entry(token_id, logprob, None, vocabulary)}
        for rank, (candidate, value) in enumerate(top, 1):
            entries[str(candidate)] = _prompt_entry(candidate, value, rank, vocabulary)
        made.append(entries)
    return made


def _places(logprobs: Logprobs, token_ids: Sequence[int]) -> Iterator[tuple[int, float, Top]]:
    """Of each place the token, its log-probability, and the likeliest tokens."""
    tops: Sequence[Top] = logprobs.top or ((),) * len(token_ids)
    return zip(token_ids, logprobs.sampled, tops, strict=True)


def _entry(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    piece = vocabulary.bytes_of(token_id)
    return {"token": _text(piece), "logprob": _finite(logprob), "bytes": list(piece)}


def _prompt_entry(
    token_id: int, logprob: float, rank: int | None, vocabulary: Vocabulary
) -> Mapping[str, Any]:
    decoded = vocabulary.bytes_of(token_id).decode("utf-8", "replace")
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": decoded}


def _legacy_name(token_id: int, vocabulary: Vocabulary) -> str:
    """The text of a token. A part of a character has OpenAI's name for that: "bytes:\\xe2\\x80"."""
    piece = vocabulary.bytes_of(token_id)
    text = _text(piece)
    return text if _is_text(piece) else f"bytes:{text}"


def _text(piece: bytes) -> str:
    return piece.decode() if _is_text(piece) else "".join(f"\\x{byte:02x}" for byte in piece)


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _num_characters(token_id: int, vocabulary: Vocabulary, dropped: int) -> int:
    """How many characters of the text begin in a token, of which the text drops this many leading spaces.
    Special tokens are not in the text.
    """
    if token_id in vocabulary.special_token_ids:
        return 0
    piece = vocabulary.bytes_of(token_id)
    spaces = len(piece) - len(piece.lstrip(b" ")) if dropped else 0
    return sum(byte & 0xC0 != 0x80 for byte in piece) - min(dropped, spaces)


def _finite(logprob: float) -> float:
    return max(LEAST, logprob)  # in this order it is LEAST for NaN, which JSON does not have either
