"""Makes answers with log-probabilities, which may be large: within a bound, and in slices, between which the
event loop serves others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
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
from penstock.openai.answers.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from penstock.openai.failures import ApiError
from penstock.openai.jsonbytes import json_bytes

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
    prompt: str | None = None,
) -> Columns:
    """The `logprobs` of tokens whose text begins at `start`. Those of a prompt go with its text."""
    columns: dict[str, list[str]] = {}
    offset = start
    async for some, ids in _slices(logprobs, token_ids):
        made, offset = completion_logprobs(some, ids, vocabulary, offset, start=start, prompt=prompt)
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
