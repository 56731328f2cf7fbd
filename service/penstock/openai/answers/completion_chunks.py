"""Makes the chunks of a streamed completion, which may have several prompts, of the client's events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

from penstock.client import AsyncGenerationStream, Delta, Finished, Started, Usage
from penstock.openai.answers.finishing import finish_reason, stop_reason
from penstock.openai.answers.frames import DONE, Frame, UsageWanted, Wanted
from penstock.openai.answers.jsontext import json_string
from penstock.openai.answers.logprobs import completion_logprobs
from penstock.openai.answers.merging import merged
from penstock.openai.answers.usage import total_usage
from penstock.openai.jsonbytes import json_bytes


async def completion_chunks(
    streams: Sequence[AsyncGenerationStream],
    answer_id: str,
    created: int,
    num_choices: int,
    wanted: Wanted,
    usage: UsageWanted,
) -> AsyncGenerator[bytes, None]:
    """The bytes of the events that are sent, to the end of all streams, which are closed in any case. There
    is one for each prompt, with `num_choices` choices. Raises ApiError if an output was aborted, and what a
    stream raises.
    """
    chunks: CompletionChunks | None = None
    used: list[Usage] = []
    async with contextlib.AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(stream)
        events = await stack.enter_async_context(contextlib.aclosing(merged(streams)))
        async for prompt, event in events:
            if isinstance(event, Started):
                if chunks is None:
                    frame = Frame("text_completion", answer_id, created, event.model, usage)
                    chunks = CompletionChunks(frame, num_choices, wanted, is_plain=not usage.always)
                chunks.started(prompt, event)
                continue
            assert chunks is not None, "the client makes sure of the order"
            if isinstance(event, Delta):
                if made := chunks.delta(prompt, event):
                    yield made
            elif isinstance(event, Finished):
                yield chunks.finished(prompt, event)
            else:
                used.append(event.usage)
    if usage.at_end and chunks is not None:
        yield chunks.frame.end(total_usage(used))
    yield DONE


class CompletionChunks:
    """The chunks of one stream."""

    def __init__(self, frame: Frame, num_choices: int, wanted: Wanted, *, is_plain: bool) -> None:
        self.frame = frame
        self._num_choices = num_choices
        self._wanted = wanted
        self._is_plain = is_plain and not wanted.token_ids and wanted.vocabulary is None
        self._prompt_ids: dict[int, str] = {}
        """From a choice to the JSON of its prompt's token ids, until they are sent with its first chunk."""
        self._offsets: dict[int, int] = {}
        """From a choice to the number of characters of its tokens so far."""

    def started(self, prompt: int, event: Started) -> None:
        """Count a prompt, and keep the ids of its tokens for the first chunks of its choices."""
        self.frame.count(prompt_tokens=event.prompt.token_count)
        if self._wanted.token_ids:
            ids = json_bytes(event.prompt.token_ids).decode()
            for index in range(prompt * self._num_choices, (prompt + 1) * self._num_choices):
                self._prompt_ids[index] = ids

    def delta(self, prompt: int, event: Delta) -> bytes | None:
        """The chunk of what was added to a choice; None if that is nothing to be sent."""
        index = prompt * self._num_choices + event.index
        if self._is_plain:
            return self.frame.chunk(_choice(index, json_string(event.delta))) if event.delta else None
        self.frame.count(completion_tokens=len(event.token_ids))
        logprobs, ids = self._logprobs(index, event), ""
        if self._wanted.token_ids:
            ids = f'{self._prompt_ids_once(index)},"token_ids":{json_bytes(event.token_ids).decode()}'
        if not event.delta and logprobs == "null" and not ids:
            return None
        return self.frame.chunk(_choice(index, json_string(event.delta), logprobs, ids))

    def finished(self, prompt: int, event: Finished) -> bytes:
        """The last chunk of a choice. Raises ApiError if the output was aborted."""
        index = prompt * self._num_choices + event.index
        reason = finish_reason(event.finish)
        more = "".join(
            f',"{name}":{json_bytes(at).decode()}' for name, at in stop_reason(event.finish).items()
        )
        return self.frame.chunk(
            _choice(index, '""', "null", self._prompt_ids_once(index) + more, f'"{reason}"')
        )

    def _prompt_ids_once(self, index: int) -> str:
        ids = self._prompt_ids.pop(index, None)
        return "" if ids is None else f',"prompt_token_ids":{ids}'

    def _logprobs(self, index: int, event: Delta) -> str:
        if self._wanted.vocabulary is None or event.logprobs is None:
            return "null"
        made, self._offsets[index] = completion_logprobs(
            event.logprobs, event.token_ids, self._wanted.vocabulary, self._offsets.get(index, 0)
        )
        return json_bytes(made).decode()


def _choice(index: int, text: str, logprobs: str = "null", more: str = "", reason: str = "null") -> str:
    """The JSON of a choice, of the JSON of its parts."""
    return f'{{"index":{index},"text":{text},"logprobs":{logprobs},"finish_reason":{reason}{more}}}'
