"""Makes the chunks of a streamed chat of the client's events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator

from penstock.client import AsyncGenerationStream, Delta, Finished, Started, Summary
from penstock.openai.answers.chat import tool_call_dict
from penstock.openai.answers.finishing import finish_reason, stop_reason
from penstock.openai.answers.frames import DONE, Frame, UsageWanted, Wanted
from penstock.openai.answers.logprobs import chat_logprobs
from penstock.openai.jsonbytes import json_bytes, json_string


async def chat_chunks(
    stream: AsyncGenerationStream, created: int, num_choices: int, wanted: Wanted, usage: UsageWanted
) -> AsyncGenerator[bytes, None]:
    """The bytes of the events that are sent, to the end of `stream`, which is closed in any case. Raises
    ApiError if an output was aborted, and what `stream` raises.
    """
    async with stream:
        started = await anext(stream)
        assert isinstance(started, Started), "the client makes sure of the order"
        chunks = ChatChunks(started, created, wanted, usage)
        yield b"".join(chunks.roles(started, num_choices))
        async for event in stream:
            if isinstance(event, Delta):
                if made := chunks.delta(event):
                    yield made
            elif isinstance(event, Finished):
                yield chunks.finished(event)
            elif isinstance(event, Summary) and usage.at_end:
                yield chunks.frame.end(event.usage)
    yield DONE


class ChatChunks:
    """The chunks of one stream."""

    def __init__(self, started: Started, created: int, wanted: Wanted, usage: UsageWanted) -> None:
        self.frame = Frame("chat.completion.chunk", started.request_id, created, started.model, usage)
        self.frame.count(prompt_tokens=started.prompt.token_count)
        self._wanted = wanted
        self._is_plain = not wanted.token_ids and wanted.vocabulary is None and not usage.always
        self._num_calls: dict[int, int] = {}
        """From a choice to the number of its calls so far."""

    def roles(self, started: Started, num_choices: int) -> Iterator[bytes]:
        """The first chunk of each choice, which says who speaks."""
        for index in range(num_choices):
            choice = _choice(index, '"role":"assistant","content":"","refusal":null')
            if self._wanted.token_ids and index == 0:
                yield self.frame.first(choice, json_bytes(started.prompt.token_ids).decode())
            else:
                yield self.frame.chunk(choice)

    def delta(self, event: Delta) -> bytes | None:
        """The chunk of what was added to a choice; None if that is nothing to be sent."""
        if self._is_plain and event.delta and not event.reasoning and not event.tool_calls:
            return self.frame.chunk(_choice(event.index, f'"content":{json_string(event.delta)}'))
        if event.token_ids:
            self.frame.count(completion_tokens=len(event.token_ids))
        parts = []
        if event.reasoning and self._wanted.reasoning:
            parts.append(f'"reasoning":{json_string(event.reasoning)}')
        if event.delta:
            parts.append(f'"content":{json_string(event.delta)}')
        if event.tool_calls:
            parts.append(f'"tool_calls":{self._calls(event)}')
        logprobs, ids = self._logprobs(event), ""
        if self._wanted.token_ids:
            ids = f',"token_ids":{json_bytes(event.token_ids).decode()}'
        if not parts and logprobs == "null" and not ids:
            return None
        return self.frame.chunk(_choice(event.index, ",".join(parts), logprobs, ids))

    def finished(self, event: Finished) -> bytes:
        """The last chunk of a choice. Raises ApiError if the output was aborted."""
        reason = finish_reason(event.finish, has_calls=event.index in self._num_calls)
        stopped = "".join(
            f',"{name}":{json_bytes(at).decode()}' for name, at in stop_reason(event.finish).items()
        )
        return self.frame.chunk(_choice(event.index, "", "null", stopped, f'"{reason}"'))

    def _calls(self, event: Delta) -> str:
        first = self._num_calls.get(event.index, 0)
        self._num_calls[event.index] = first + len(event.tool_calls)
        calls = [
            {"index": number, **tool_call_dict(call)} for number, call in enumerate(event.tool_calls, first)
        ]
        return json_bytes(calls).decode()

    def _logprobs(self, event: Delta) -> str:
        if self._wanted.vocabulary is None or event.logprobs is None:
            return "null"
        content = chat_logprobs(event.logprobs, event.token_ids, self._wanted.vocabulary)
        return json_bytes({"content": content, "refusal": None}).decode()


def _choice(index: int, delta: str, logprobs: str = "null", more: str = "", reason: str = "null") -> str:
    """The JSON of a choice, of the JSON of its parts."""
    return f'{{"index":{index},"delta":{{{delta}}},"logprobs":{logprobs},"finish_reason":{reason}{more}}}'
