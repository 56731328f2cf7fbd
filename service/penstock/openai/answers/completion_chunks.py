"""Makes the chunks of a streamed completion, which may have several prompts, of the client's events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence

from penstock.client import AsyncGenerationStream, Delta, Finished, Started, Usage
from penstock.openai.answers.echo import Echo, Repeated
from penstock.openai.answers.finishing import finish_reason, stop_reason
from penstock.openai.answers.frames import DONE, Frame, UsageWanted, Wanted
from penstock.openai.answers.large import Bound, columns_json
from penstock.openai.answers.logprobs import completion_logprobs
from penstock.openai.answers.merging import merged
from penstock.openai.answers.usage import total_usage
from penstock.openai.jsonbytes import json_bytes, json_string


async def completion_chunks(
    streams: Sequence[AsyncGenerationStream],
    answer_id: str,
    created: int,
    num_choices: int,
    wanted: Wanted,
    usage: UsageWanted,
    echo: Echo | None = None,
) -> AsyncGenerator[bytes, None]:
    """The bytes of the events that are sent, to the end of all streams, which are closed in any case. There
    is one for each prompt, with `num_choices` choices. With an echo the first chunk of each choice has its
    prompt. Raises ApiError if an output was aborted, and if the log-probabilities of the prompts are too many
    to be sent, and what a stream raises.
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

    def started(self, prompt: int, event: Started) -> None:
        """Count a prompt, and keep the ids of its tokens for the first chunks of its choices."""
        self.frame.count(prompt_tokens=event.prompt.token_count)
        if self._wanted.token_ids:
            ids = json_bytes(event.prompt.token_ids).decode()
            for index in range(prompt * self._num_choices, (prompt + 1) * self._num_choices):
                self._prompt_ids[index] = ids

    def repeated(self, prompt: int, begins: Repeated) -> Iterator[bytes]:
        """The first chunks of all choices of a prompt, which have the prompt."""
        self._starts[prompt] = len(begins.text)
        text = json_string(begins.text)
        logprobs = "null" if begins.logprobs is None else columns_json(begins.logprobs)
        for index in range(prompt * self._num_choices, (prompt + 1) * self._num_choices):
            ids = f'{self._prompt_ids_once(index)},"token_ids":[]' if self._wanted.token_ids else ""
            yield self.frame.chunk(_choice(index, text, logprobs, ids))

    def delta(self, prompt: int, event: Delta) -> bytes | None:
        """The chunk of what was added to a choice; None if that is nothing to be sent."""
        index = prompt * self._num_choices + event.index
        if self._is_plain:
            return self.frame.chunk(_choice(index, json_string(event.delta))) if event.delta else None
        self.frame.count(completion_tokens=len(event.token_ids))
        if self._is_prompt_only:
            return None
        logprobs, ids = self._logprobs(index, self._starts.get(prompt, 0), event), ""
        if self._wanted.token_ids:
            ids = f'{self._prompt_ids_once(index)},"token_ids":{json_bytes(event.token_ids).decode()}'
        if not event.delta and logprobs == "null" and not ids:
            return None
        return self.frame.chunk(_choice(index, json_string(event.delta), logprobs, ids))

    def finished(self, prompt: int, event: Finished) -> bytes:
        """The last chunk of a choice. Raises ApiError if the output was aborted."""
        index = prompt * self._num_choices + event.index
        reason, stopped_at = finish_reason(event.finish), stop_reason(event.finish)
        if self._is_prompt_only:
            reason, stopped_at = "length", {}
        more = "".join(f',"{name}":{json_bytes(at).decode()}' for name, at in stopped_at.items())
        return self.frame.chunk(
            _choice(index, '""', "null", self._prompt_ids_once(index) + more, f'"{reason}"')
        )

    def _prompt_ids_once(self, index: int) -> str:
        ids = self._prompt_ids.pop(index, None)
        return "" if ids is None else f',"prompt_token_ids":{ids}'

    def _logprobs(self, index: int, start: int, event: Delta) -> str:
        if self._wanted.vocabulary is None or event.logprobs is None:
            return "null"
        made, self._offsets[index] = completion_logprobs(
            event.logprobs,
            event.token_ids,
            self._wanted.vocabulary,
            self._offsets.get(index, start),
            start=start,
        )
        return json_bytes(made).decode()


def _choice(index: int, text: str, logprobs: str = "null", more: str = "", reason: str = "null") -> str:
    """The JSON of a choice, of the JSON of its parts."""
    return f'{{"index":{index},"text":{text},"logprobs":{logprobs},"finish_reason":{reason}{more}}}'
