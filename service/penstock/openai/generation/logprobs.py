"""Log-probabilities in OpenAI's shapes, and in vLLM's for prompts; answers with them may be large, and are
made within a bound and in slices, between which the event loop serves others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final

from penstock.client import (
    AsyncGenerationStream,
    Delta,
    Generation,
    Logprobs,
    Output,
    PromptInfo,
    Started,
    Vocabulary,
)
from penstock.openai.failures import ApiError
from penstock.openai.jsonbytes import json_bytes

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
    dropped: int | None = None,
    prompt: str | None = None,
) -> tuple[dict[str, Any], int]:
    """The `logprobs` of a completion's choice, and where in the text the next token begins. `text_offset` is
    where the first of these tokens begins, and `start` where the output or the prompt begins that they are
    of. It loses `dropped` leading spaces there, by default those of a text of its own. The token itself is
    among the likeliest in any case, as in OpenAI's API.

    The tokens of a prompt go with its text. The first of them has no log-probability, so it has null.
    """
    made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    if dropped is None:
        dropped = vocabulary.dropped_leading_spaces
    for token_id, logprob, top in _places(logprobs, token_ids):
        name = _legacy_name(token_id, vocabulary)
        made["tokens"].append(name)
        made["text_offset"].append(text_offset if prompt is None else min(text_offset, len(prompt)))
        if (
            prompt is not None
            and token_id in vocabulary.special_token_ids
            and prompt.startswith(name, text_offset)
        ):
            text_offset += len(name)
        else:
            text_offset += _num_characters(token_id, vocabulary, dropped if text_offset == start else 0)
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


def dropped_after(prompt_ids: Sequence[int], vocabulary: Vocabulary) -> int:
    """How many leading spaces the output after these tokens loses: those that the prompt has not lost."""
    left = vocabulary.dropped_leading_spaces
    for token_id in prompt_ids if left else ():
        piece = b"" if token_id in vocabulary.special_token_ids else vocabulary.bytes_of(token_id)
        if len(piece) >= left or piece.strip(b" "):
            return 0
        left -= len(piece)
    return left


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


MOST_ENTRIES: Final = 500_000
"""How many log-probabilities an answer may have that is not a stream. Each takes about 80 bytes."""
Columns = Mapping[str, Sequence[str]]
"""The four lists of a completion's `logprobs`: of each the JSON of its items, in parts, without brackets."""
_SLICE: Final = 256
"""How many tokens' log-probabilities are written without a break."""


class Bound:
    """How many log-probabilities an answer may still have."""

    def __init__(self, left: int = MOST_ENTRIES, *, instead: str = "ask for fewer, or for a stream") -> None:
        """`instead` says what a caller can do who has asked for too many."""
        self._left = left
        self._instead = instead

    def take(self, logprobs: Logprobs | None, times: int = 1) -> None:
        """Count these, which are sent so many times. Raises ApiError if there are too many."""
        if logprobs is not None:
            each = 1 + (len(logprobs.top[-1]) if logprobs.top else 0)
            self._left -= len(logprobs.sampled) * each * times
        if self._left < 0:
            message = f"The answer has too many log-probabilities to be sent whole: {self._instead}."
            raise ApiError(400, message, code="response_too_large")


async def read_whole(stream: AsyncGenerationStream, bound: Bound, prompt_copies: int = 1) -> Generation:
    """Read a stream to its end. Its messages are small, so that taking them apart holds up nobody. Raises
    ApiError if there are more log-probabilities than the bound allows. Those of the prompt are in the answer
    `prompt_copies` times.
    """
    async with stream:
        async for event in stream:
            if isinstance(event, Delta):
                bound.take(event.logprobs)
            elif isinstance(event, Started):
                bound.take(event.prompt.logprobs, prompt_copies)
        return await stream.result()


async def chat_logprobs_json(output: Output, vocabulary: Vocabulary) -> str:
    """The `logprobs` of a chat's choice, as JSON."""
    if output.logprobs is None:
        return "null"
    entries = [
        json_bytes(chat_logprobs(logprobs, ids, vocabulary)).decode()[1:-1]
        async for logprobs, ids in _slices(output.logprobs, output.token_ids)
    ]
    return f'{{"content":[{",".join(entries)}],"refusal":null}}'


async def completion_columns(
    logprobs: Logprobs,
    token_ids: Sequence[int],
    vocabulary: Vocabulary,
    *,
    start: int = 0,
    dropped: int | None = None,
    prompt: str | None = None,
) -> Columns:
    """The `logprobs` of tokens whose text begins at `start`, as `completion_logprobs` makes them."""
    columns: dict[str, list[str]] = {}
    offset = start
    async for some, ids in _slices(logprobs, token_ids):
        made, offset = completion_logprobs(
            some, ids, vocabulary, offset, start=start, dropped=dropped, prompt=prompt
        )
        for name, values in made.items():
            columns.setdefault(name, []).append(json_bytes(values).decode()[1:-1])
    return columns


def columns_json(*columns: Columns) -> str:
    """The `logprobs` of a completion's choice, as JSON: these, one after the other."""
    names = dict.fromkeys(name for part in columns for name in part)
    lists = {name: ",".join(text for part in columns for text in part.get(name, ())) for name in names}
    return "{" + ",".join(f'"{name}":[{items}]' for name, items in lists.items()) + "}"


async def prompt_logprobs_json(prompt: PromptInfo, vocabulary: Vocabulary) -> str:
    """`prompt_logprobs`, as JSON."""
    if prompt.logprobs is None:
        return "null"
    entries = [
        json_bytes(prompt_logprobs(logprobs, ids, vocabulary)).decode()[1:-1]
        async for logprobs, ids in _slices(prompt.logprobs, prompt.token_ids)
    ]
    return f"[{','.join(entries)}]"


def spliced(made: Mapping[str, Any], more: Mapping[str, str], choices: Sequence[Mapping[str, str]]) -> bytes:
    """The JSON of an answer with `more` fields, and with further fields of its choices, which are JSON
    already.
    """
    written = [_with(choice, own) for choice, own in zip(made["choices"], choices, strict=True)]
    return _with(made, {**more, "choices": f"[{','.join(written)}]"}).encode()


def _with(value: Mapping[str, Any], more: Mapping[str, str]) -> str:
    kept = json_bytes({name: item for name, item in value.items() if name not in more}).decode()
    return kept[:-1] + "".join(f',"{name}":{text}' for name, text in more.items()) + "}"


async def _slices(
    logprobs: Logprobs, token_ids: Sequence[int]
) -> AsyncIterator[tuple[Logprobs, Sequence[int]]]:
    for first in range(0, len(token_ids), _SLICE):
        some = slice(first, first + _SLICE)
        yield Logprobs(logprobs.sampled[some], logprobs.top[some]), token_ids[some]
        await asyncio.sleep(0)
