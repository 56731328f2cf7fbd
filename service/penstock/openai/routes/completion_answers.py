"""Makes the answer to a completion, whole or in chunks, which may have several prompts and repeat them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from penstock.client import (
    AsyncGenerationStream,
    Delta,
    Finished,
    Generation,
    Output,
    PromptInfo,
    Started,
    Usage,
    Vocabulary,
)
from penstock.openai.failures import ApiError
from penstock.openai.generation.frames import (
    DONE,
    Frame,
    UsageWanted,
    Wanted,
    finish_reason,
    stop_reason,
    total_usage,
    usage_dict,
)
from penstock.openai.generation.logprobs import (
    Bound,
    Columns,
    TextTokens,
    columns_json,
    completion_columns,
    completion_logprobs,
    dropped_after,
    prompt_logprobs_json,
    spliced,
)
from penstock.openai.jsonbytes import json_bytes, json_string

MOST_CHARACTERS: Final = 4 << 20
"""How many characters of prompts an answer may repeat, in all of its choices together. A token id counts as
the bytes of its token.
"""

_SLICE: Final = 65_536
"""How many token ids are counted without a break."""

Sent = str | Sequence[int]
"""A prompt as its caller sent it, which is a text or token ids."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """What the choices of one prompt begin with."""

    text: str
    logprobs: Columns | None


@dataclass(frozen=True, slots=True)
class Echo:
    """How the choices of a completion begin with their prompts."""

    prompts: Sequence[Sent]
    vocabulary: Vocabulary | None
    """None only where all prompts are texts, of which nothing is cut, without log-probabilities."""
    has_logprobs: bool = False
    with_special: bool = False
    """Whether the text of token ids has special tokens."""
    is_all: bool = False
    """Whether the prompts are all that is told, so that what the server added is left out."""

    async def check(self, num_choices: int) -> None:
        """Raise ApiError if all choices together would repeat too much. Token ids are counted in slices,
        between which the event loop serves others.
        """
        repeated = 0
        for prompt in self.prompts:
            if isinstance(prompt, str):
                repeated += len(prompt)
                continue
            for first in range(0, len(prompt), _SLICE):
                repeated += self._num_bytes(prompt[first : first + _SLICE])
                await asyncio.sleep(0)
        if num_choices * repeated > MOST_CHARACTERS:
            message = (
                f"The answer would repeat more than {MOST_CHARACTERS} characters of prompts: "
                "leave echo out, or ask for fewer choices."
            )
            raise ApiError(400, message, param="echo", code="response_too_large")

    async def repeated(self, number: int, prompt: PromptInfo) -> Repeated:
        """Return what the choices of this prompt begin with. `number` is its index. A text is repeated as it
        was sent, unless the server has cut it: then, as that of token ids, it is the text of its tokens.
        """
        sent = self.prompts[number]
        if isinstance(sent, str) and not prompt.truncated_tokens:
            text = sent
        else:
            assert self.vocabulary is not None
            text = self.vocabulary.text_of(prompt.token_ids, with_special=self.with_special)
        if not self.has_logprobs:
            return Repeated(text, None)
        assert self.vocabulary is not None
        assert prompt.logprobs is not None, "the server was asked for them"
        columns = await completion_columns(prompt.logprobs, prompt.token_ids, self.vocabulary, prompt=text)
        return Repeated(text, columns)

    def _num_bytes(self, token_ids: Sequence[int]) -> int:
        """Tell how many bytes the tokens have. The server refuses ids that there are not, so they have
        none.
        """
        assert self.vocabulary is not None
        tokens = self.vocabulary.tokens
        return sum(len(tokens[i]) for i in token_ids if 0 <= i < len(tokens))


EventT = TypeVar("EventT")

_MOST_WAITING = 64
"""Events that may wait for a reader who is slower than the server. What comes after them waits at the server.
"""


async def merged(streams: Sequence[AsyncIterator[EventT]]) -> AsyncGenerator[tuple[int, EventT], None]:
    """Yield the events of all streams as they come, each with the number of the stream that it belongs to.

    Raises the first error of any stream. Then, and when it is closed, the others are read no further; to end
    them is the caller's part.
    """
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    waiting: asyncio.Queue[tuple[int, EventT] | Exception | None] = asyncio.Queue(_MOST_WAITING)

    async def read(number: int, stream: AsyncIterator[EventT]) -> None:
        try:
            async for event in stream:
                await waiting.put((number, event))
        except Exception as error:  # noqa: BLE001 -- it is raised where the events are read
            await waiting.put(error)
        else:
            await waiting.put(None)

    readers = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    left = len(readers)
    try:
        while left:
            read_last = await waiting.get()
            if isinstance(read_last, Exception):
                raise read_last
            if read_last is None:
                left -= 1
            else:
                yield read_last
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


NOTHING = Repeated("", None)
"""What a choice begins with that does not repeat its prompt."""


async def completion_answer(
    answers: Sequence[Generation], answer_id: str, created: int, wanted: Wanted, echo: Echo | None = None
) -> bytes:
    """Write the JSON of the object "text_completion" of the answers to all prompts, in their order. Choice j
    of prompt i has the index i * n + j. Raises ApiError if an output was aborted.
    """
    is_prompt_only = echo is not None and echo.is_all
    choices: list[dict[str, Any]] = []
    logprobs: list[dict[str, str]] = []
    for i, answer in enumerate(answers):
        begins = NOTHING if echo is None else await echo.repeated(i, answer.prompt)
        of_prompt = {}
        if wanted.prompt_logprobs and wanted.vocabulary is not None:
            of_prompt["prompt_logprobs"] = await prompt_logprobs_json(answer.prompt, wanted.vocabulary)
        for output in answer.outputs:
            index = i * len(answer.outputs) + output.index
            choices.append(_choice(output, answer, index, wanted, begins.text, is_prompt_only))
            if wanted.vocabulary is not None:
                told = await _logprobs(output, answer.prompt, wanted.vocabulary, begins, is_prompt_only)
                logprobs.append({"logprobs": told} | of_prompt)
    made = {
        "id": answer_id,
        "object": "text_completion",
        "created": created,
        "model": answers[0].model,
        "choices": choices,
        "usage": usage_dict(total_usage(answer.usage for answer in answers)),
    }
    return json_bytes(made) if wanted.vocabulary is None else spliced(made, {}, logprobs)


def _choice(
    output: Output, answer: Generation, index: int, wanted: Wanted, begins: str, is_prompt_only: bool
) -> dict[str, Any]:
    reason = finish_reason(output.finish)
    choice: dict[str, Any] = {
        "index": index,
        "text": begins if is_prompt_only else begins + output.text,
        "logprobs": None,
        "finish_reason": "length" if is_prompt_only else reason,
        **({} if is_prompt_only else stop_reason(output.finish)),
    }
    if wanted.token_ids:
        choice["token_ids"] = [] if is_prompt_only else output.token_ids
        choice["prompt_token_ids"] = answer.prompt.token_ids
    return choice


async def _logprobs(
    output: Output, prompt: PromptInfo, vocabulary: Vocabulary, begins: Repeated, is_prompt_only: bool
) -> str:
    """Write the `logprobs` of a choice, as JSON."""
    parts = [] if begins.logprobs is None else [begins.logprobs]
    if output.logprobs is not None and not is_prompt_only:
        start, dropped = len(begins.text), dropped_after(prompt.token_ids, vocabulary)
        parts.append(
            await completion_columns(
                output.logprobs, output.token_ids, vocabulary, start=start, dropped=dropped
            )
        )
    return columns_json(*parts) if parts else "null"


async def completion_chunks(
    streams: Sequence[AsyncGenerationStream],
    answer_id: str,
    created: int,
    num_choices: int,
    wanted: Wanted,
    usage: UsageWanted,
    echo: Echo | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of the events that are sent, to the end of all streams, which are closed in any case.
    There is one for each prompt, with `num_choices` choices. With an echo the first chunk of each choice has
    its prompt. Raises ApiError if an output was aborted, and if the log-probabilities of the prompts are too
    many to be sent, and what a stream raises.
    """
    chunks: CompletionChunks | None = None
    bound = Bound(instead="ask for fewer, or for fewer choices")
    is_prompt_only = echo is not None and echo.is_all
    used: list[Usage] = []
    async with contextlib.AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(stream)
        events = await stack.enter_async_context(contextlib.aclosing(merged(streams)))
        async for prompt, event in events:
            if isinstance(event, Started):
                if chunks is None:
                    frame = Frame("text_completion", answer_id, created, event.model, usage)
                    chunks = CompletionChunks(
                        frame,
                        num_choices,
                        wanted,
                        is_plain=not usage.always,
                        is_prompt_only=is_prompt_only,
                    )
                chunks.started(prompt, event)
                if echo is not None:
                    bound.take(event.prompt.logprobs, num_choices)
                    for made in chunks.repeated(prompt, await echo.repeated(prompt, event.prompt)):
                        yield made
                continue
            assert chunks is not None, "the client makes sure of the order"
            if isinstance(event, Delta):
                if of_delta := chunks.delta(prompt, event):
                    yield of_delta
            elif isinstance(event, Finished):
                yield chunks.finished(prompt, event)
            else:
                used.append(event.usage)
    if usage.at_end and chunks is not None:
        yield chunks.frame.end(total_usage(used))
    yield DONE


class CompletionChunks:
    """The chunks of one stream."""

    def __init__(
        self, frame: Frame, num_choices: int, wanted: Wanted, *, is_plain: bool, is_prompt_only: bool = False
    ) -> None:
        """`is_plain` is a stream whose chunks have no more than text, and `is_prompt_only` one that leaves
        out what the server added to the prompts.
        """
        self.frame = frame
        self._is_prompt_only = is_prompt_only
        self._num_choices = num_choices
        self._wanted = wanted
        self._is_plain = (
            is_plain and not is_prompt_only and not wanted.token_ids and wanted.vocabulary is None
        )
        self._prompt_ids: dict[int, str] = {}
        """From a choice to the JSON of its prompt's token ids, until they are sent with its first chunk."""
        self._offsets: dict[int, int] = {}
        """From a choice to the number of characters of its tokens so far, with the prompt's."""
        self._starts: dict[int, int] = {}
        """From a prompt to where in a choice's text the output begins: after what was repeated of it."""
        self._dropped: dict[int, int] = {}
        """From a prompt to how many leading spaces the outputs after it lose."""
        self._texts: defaultdict[int, TextTokens] | None = None
        """From a choice to what finds the tokens of its text; None where all tokens are told."""
        if wanted.text_tokens is not None:
            self._texts = defaultdict(wanted.text_tokens)

    def started(self, prompt: int, event: Started) -> None:
        """Count a prompt, and keep the ids of its tokens for the first chunks of its choices."""
        self.frame.count(prompt_tokens=event.prompt.token_count)
        if self._wanted.vocabulary is not None:
            self._dropped[prompt] = dropped_after(event.prompt.token_ids, self._wanted.vocabulary)
        if self._wanted.token_ids:
            ids = json_bytes(event.prompt.token_ids).decode()
            for index in range(prompt * self._num_choices, (prompt + 1) * self._num_choices):
                self._prompt_ids[index] = ids

    def repeated(self, prompt: int, begins: Repeated) -> Iterator[bytes]:
        """Yield the first chunks of all choices of a prompt, which have the prompt."""
        self._starts[prompt] = len(begins.text)
        text = json_string(begins.text)
        logprobs = "null" if begins.logprobs is None else columns_json(begins.logprobs)
        for index in range(prompt * self._num_choices, (prompt + 1) * self._num_choices):
            ids = f'{self._prompt_ids_once(index)},"token_ids":[]' if self._wanted.token_ids else ""
            yield self.frame.chunk(_chunk_choice(index, text, logprobs, ids))

    def delta(self, prompt: int, event: Delta) -> bytes | None:
        """Make the chunk of what was added to a choice; None if that is nothing to be sent."""
        index = prompt * self._num_choices + event.index
        if self._is_plain:
            return self.frame.chunk(_chunk_choice(index, json_string(event.delta))) if event.delta else None
        self.frame.count(completion_tokens=len(event.token_ids))
        if self._is_prompt_only:
            return None
        logprobs, ids = self._logprobs(index, prompt, event), ""
        if self._wanted.token_ids:
            ids = f'{self._prompt_ids_once(index)},"token_ids":{json_bytes(event.token_ids).decode()}'
        if not event.delta and logprobs == "null" and not ids:
            return None
        return self.frame.chunk(_chunk_choice(index, json_string(event.delta), logprobs, ids))

    def finished(self, prompt: int, event: Finished) -> bytes:
        """Make the last chunk of a choice. Raises ApiError if the output was aborted."""
        index = prompt * self._num_choices + event.index
        reason, stopped_at = finish_reason(event.finish), stop_reason(event.finish)
        if self._is_prompt_only:
            reason, stopped_at = "length", {}
        more = "".join(f',"{name}":{json_bytes(at).decode()}' for name, at in stopped_at.items())
        return self.frame.chunk(
            _chunk_choice(index, '""', "null", self._prompt_ids_once(index) + more, f'"{reason}"')
        )

    def _prompt_ids_once(self, index: int) -> str:
        ids = self._prompt_ids.pop(index, None)
        return "" if ids is None else f',"prompt_token_ids":{ids}'

    def _logprobs(self, index: int, prompt: int, event: Delta) -> str:
        if self._texts is not None:
            event = self._texts[index].of_delta(event)
        if self._wanted.vocabulary is None or event.logprobs is None or not event.token_ids:
            return "null"
        start = self._starts.get(prompt, 0)
        made, self._offsets[index] = completion_logprobs(
            event.logprobs,
            event.token_ids,
            self._wanted.vocabulary,
            self._offsets.get(index, start),
            start=start,
            dropped=self._dropped[prompt],
        )
        return json_bytes(made).decode()


def _chunk_choice(index: int, text: str, logprobs: str = "null", more: str = "", reason: str = "null") -> str:
    """Write the JSON of a choice from the JSON of its parts."""
    return f'{{"index":{index},"text":{text},"logprobs":{logprobs},"finish_reason":{reason}{more}}}'
