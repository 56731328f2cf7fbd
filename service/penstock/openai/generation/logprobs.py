"""Log-probabilities in OpenAI's shapes, and in vLLM's for prompts; answers with them may be large, and are
made within a bound and in slices, between which the event loop serves others.

The server sends those of all tokens: also of what the model thought, of tags and of calls, of the end token,
and of those in which a stop string was found. It may send tokens before the text that they are. `TextTokens`
finds those of the text.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
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
    """List the entries of `logprobs.content` of a chat, one for each token."""
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
    """Make the `logprobs` of a completion's choice, and say where in the text the next token begins.
    `text_offset` is where the first of these tokens begins, and `start` where the output or the prompt begins
    that they are of. It loses `dropped` leading spaces there, by default those of a text of its own. The
    token itself is among the likeliest in any case, as in OpenAI's API.

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
    """Tell how many leading spaces the output after these tokens loses: those that the prompt has not
    lost.
    """
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
    """Write vLLM's `prompt_logprobs`: for each token of the prompt but the first, from an id to its
    log-probability and rank. The rank is null of a token that is not among the likeliest that were asked for.
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
    """Return of each place the token, its log-probability, and the likeliest tokens."""
    tops: Sequence[Top] = logprobs.top or ((),) * len(token_ids)
    return zip(token_ids, logprobs.sampled, tops, strict=True)


class TextTokens:
    """Finds the tokens of each piece of one output's text among all tokens of the output."""

    def __init__(self, vocabulary: Vocabulary, *, with_special: bool = False, is_parsed: bool = True) -> None:
        """`with_special` is a text that has its special tokens. Of a text that is not parsed, nothing is left
        out before its end but spaces and special tokens.
        """
        self._vocabulary = vocabulary
        self._hidden = frozenset[int]() if with_special else vocabulary.special_token_ids
        self._is_parsed = is_parsed
        self._waiting: list[tuple[int, float, Top]] = []
        """Tokens whose text has not come yet."""
        self._begun = b""
        """The end of the last token that was taken, if only its beginning was in the text."""

    def of_delta(self, delta: Delta) -> Delta:
        """Return the delta with no other tokens than those of its text, which may have come with earlier
        ones. A token whose text comes in two deltas is told with the first. All that have come are told where
        their bytes do not hold the text, but for special tokens. Without log-probabilities it stays as it is.
        """
        if delta.logprobs is None:
            return delta
        self._waiting.extend(_places(delta.logprobs, delta.token_ids))
        taken = self._taken(delta)
        ids, sampled, top = zip(*taken, strict=True) if taken else ((), (), ())
        return replace(delta, token_ids=ids, logprobs=Logprobs(sampled, top))

    def _taken(self, delta: Delta) -> list[tuple[int, float, Top]]:
        if not delta.delta:
            if delta.reasoning or delta.tool_calls or delta.tool_call_deltas:
                self._waiting, self._begun = [], b""
            return []
        pieces = [self._begun, *(self._piece(token_id) for token_id, _, _ in self._waiting)]
        joined, thought, said = b"".join(pieces), delta.reasoning.encode(), delta.delta.encode()
        after = joined.find(thought) + len(thought) if thought and thought in joined else 0
        start = _found(said, joined, list(accumulate(map(len, pieces), initial=0)), after)
        if start < 0:
            taken = [place for place, piece in zip(self._waiting, pieces[1:], strict=True) if piece]
            self._waiting, self._begun = [], b""
            return taken
        return self._between(pieces[1:], joined, start if self._is_parsed else 0, start + len(said))

    def _piece(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self._vocabulary.bytes_of(token_id)

    def _between(
        self, pieces: Sequence[bytes], joined: bytes, start: int, end: int
    ) -> list[tuple[int, float, Top]]:
        """Take the tokens that have a byte from `start` to `end`. Those before are dropped, those after
        wait.
        """
        taken, later = [], []
        first = reached = len(self._begun)
        for place, piece in zip(self._waiting, pieces, strict=True):
            last = first + len(piece)
            if first >= end:
                later.append(place)
            else:
                reached = last
                if last > max(first, start):
                    taken.append(place)
            first = last
        self._waiting, self._begun = later, joined[end:reached]
        return taken


def _found(said: bytes, joined: bytes, starts: list[int], after: int) -> int:
    """Tell where in `joined` the text is: -1 for nowhere. A place at the start of a token, but for white
    space, is preferred: the text may also be a part of a tag that comes before it.
    """
    first = place = joined.find(said, after)
    while place >= 0:
        start = starts[bisect_right(starts, place) - 1]
        if not joined[start:place].strip():
            return place
        place = joined.find(said, place + 1)
    return first


def _entry(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    piece = vocabulary.bytes_of(token_id)
    return {"token": _text(piece), "logprob": _finite(logprob), "bytes": list(piece)}


def _prompt_entry(
    token_id: int, logprob: float, rank: int | None, vocabulary: Vocabulary
) -> Mapping[str, Any]:
    decoded = vocabulary.bytes_of(token_id).decode("utf-8", "replace")
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": decoded}


def _legacy_name(token_id: int, vocabulary: Vocabulary) -> str:
    """Return the text of a token. A part of a character has OpenAI's name for that: "bytes:\\xe2\\x80"."""
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
    """Tell how many characters of the text begin in a token, of which the text drops this many leading
    spaces. Special tokens are not in the text.
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
_COLUMNS: Final = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
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


async def read_whole(
    stream: AsyncGenerationStream,
    bound: Bound,
    prompt_copies: int = 1,
    text_tokens: Callable[[], TextTokens] | None = None,
) -> Generation:
    """Read a stream to its end. Its messages are small, so that taking them apart holds up nobody. Raises
    ApiError if there are more log-probabilities than the bound allows. Those of the prompt are in the answer
    `prompt_copies` times. With `text_tokens` outputs that have log-probabilities have the tokens of their
    text only.
    """
    texts: defaultdict[int, TextTokens] | None = None if text_tokens is None else defaultdict(text_tokens)
    of_text: defaultdict[int, list[Delta]] = defaultdict(list)
    async with stream:
        async for event in stream:
            if isinstance(event, Delta):
                bound.take(event.logprobs)
                if texts is not None and event.logprobs is not None:
                    of_text[event.index].append(texts[event.index].of_delta(event))
            elif isinstance(event, Started):
                bound.take(event.prompt.logprobs, prompt_copies)
        answer = await stream.result()
    outputs = tuple(_with_tokens(output, of_text.get(output.index)) for output in answer.outputs)
    return replace(answer, outputs=outputs)


def _with_tokens(output: Output, deltas: Sequence[Delta] | None) -> Output:
    """Return the output with the tokens of these deltas; as it is without any."""
    if deltas is None:
        return output
    told = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    logprobs = Logprobs(
        tuple(value for one in told for value in one.sampled), tuple(top for one in told for top in one.top)
    )
    token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
    return replace(output, token_ids=token_ids, logprobs=logprobs)


async def chat_logprobs_json(output: Output, vocabulary: Vocabulary) -> str:
    """Write the `logprobs` of a chat's choice, as JSON."""
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
    """Write the `logprobs` of tokens whose text begins at `start`, as `completion_logprobs` makes them."""
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
    """Write the `logprobs` of a completion's choice, as JSON: these, one after the other."""
    lists = {name: ",".join(text for part in columns for text in part.get(name, ())) for name in _COLUMNS}
    return "{" + ",".join(f'"{name}":[{items}]' for name, items in lists.items()) + "}"


async def prompt_logprobs_json(prompt: PromptInfo, vocabulary: Vocabulary) -> str:
    """Write `prompt_logprobs`, as JSON."""
    if prompt.logprobs is None:
        return "null"
    entries = [
        json_bytes(prompt_logprobs(logprobs, ids, vocabulary)).decode()[1:-1]
        async for logprobs, ids in _slices(prompt.logprobs, prompt.token_ids)
    ]
    return f"[{','.join(entries)}]"


def spliced(made: Mapping[str, Any], more: Mapping[str, str], choices: Sequence[Mapping[str, str]]) -> bytes:
    """Write the JSON of an answer with `more` fields, and with further fields of its choices, which are JSON
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
