"""Makes the answer of /v1/responses: whole, or as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from penstock.client import (
    AsyncGenerationStream,
    Delta,
    Finish,
    Finished,
    Generation,
    Logprobs,
    PenstockClientError,
    SamplingDefaults,
    Started,
    StreamEvent,
    Summary,
    Usage,
)
from penstock.openai.answers.finishing import finish_reason
from penstock.openai.answers.logprobs import chat_logprobs
from penstock.openai.answers.responses.events import EventWriter
from penstock.openai.answers.responses.items import OutputItems
from penstock.openai.answers.responses.response_object import empty_response, ended_response, failed_response
from penstock.openai.answers.responses.text_logprobs import TextLogprobs
from penstock.openai.failures import ApiError, of_client_error
from penstock.openai.schemas.responses import ResponsesBody
from penstock.openai.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer is made with, beside what the server sends."""

    body: ResponsesBody
    number: str
    """32 hexadecimal digits, of which the ids of the response and of its items are made."""
    created: int
    """When the request came, in seconds of Unix time."""
    defaults: SamplingDefaults
    carries_reasoning: bool = False
    vocabulary: Vocabulary | None = None
    """What tokens look like; None unless log-probabilities were asked for."""

    @property
    def response_id(self) -> str:
        return f"resp_{self.number}"


class ResponseWriter:
    """Writes the events of one response, and keeps the response."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._events = EventWriter()
        self._items = OutputItems(asked.number, self._events, carries_reasoning=asked.carries_reasoning)
        self._logprobs = TextLogprobs()
        self._finish: Finish | None = None
        self.response: dict[str, Any] | None = None
        """The response as it is now; None before the server has taken the request."""

    def feed(self, event: StreamEvent) -> str:
        """The events that tell of one of the server's; empty where nothing is to be told.

        Raises ApiError if the output was aborted.
        """
        match event:
            case Started():
                return self.begin(event.model)
            case Delta():
                return self.add(event)
            case Finished():
                self._finish = event.finish
                return ""
            case Summary():
                assert self._finish is not None, "the client has checked the order of the stream"
                return self.end(self._finish, event.usage)

    def begin(self, model: str) -> str:
        """The first events, for a request that the server has taken."""
        asked = self._asked
        self.response = empty_response(asked.body, asked.response_id, model, asked.created, asked.defaults)
        told = {"response": self.response}
        return self._events.event("created", told) + self._events.event("in_progress", told)

    def add(self, delta: Delta) -> str:
        """The events of what was added to the output."""
        said = self._items.reasoning(delta.reasoning) if delta.reasoning else ""
        entries = self._of_text(delta)
        if delta.delta:
            said += self._items.text(delta.delta, entries)
        for call in delta.tool_calls:
            said += self._items.call(call)
        return said

    def end(self, finish: Finish, usage: Usage) -> str:
        """The last events of an output that has ended. Raises ApiError if it was aborted."""
        assert self.response is not None
        is_whole = finish_reason(finish) == "stop"
        said = "" if self._items.items else self._items.text("")
        said += self._items.end("completed" if is_whole else "incomplete")
        self.response = ended_response(
            self.response, self._items.items, usage, is_whole=is_whole, now=int(time.time())
        )
        return said + self._events.event(
            "completed" if is_whole else "incomplete", {"response": self.response}
        )

    def fail(self, error: ApiError) -> str:
        """The last events of a response that failed after it had begun."""
        assert self.response is not None
        said = self._items.end("incomplete")
        self.response = failed_response(self.response, self._items.items, error)
        return said + self._events.event("failed", {"response": self.response})

    def _of_text(self, delta: Delta) -> list[dict[str, Any]]:
        """The log-probabilities of the tokens that the delta's text is made of."""
        vocabulary, logprobs = self._asked.vocabulary, delta.logprobs
        if vocabulary is None:
            return []
        entries = chat_logprobs(logprobs or Logprobs(), delta.token_ids, vocabulary)
        return self._logprobs.of_delta(entries, delta.reasoning, delta.delta, bool(delta.tool_calls))


def whole_response(answer: Generation, asked: Asked) -> dict[str, Any]:
    """The response to a request that does not stream. Raises ApiError if the output was aborted."""
    writer = ResponseWriter(asked)
    writer.begin(answer.model)
    output = answer.outputs[0]
    writer.add(
        Delta(
            output.index,
            output.text,
            output.token_ids,
            output.logprobs,
            reasoning=output.reasoning,
            tool_calls=output.tool_calls,
        )
    )
    writer.end(output.finish, answer.usage)
    assert writer.response is not None
    return writer.response


async def response_events(
    stream: AsyncGenerationStream, asked: Asked, params: Callable[[], Mapping[str, str]]
) -> AsyncGenerator[bytes, None]:
    """The events of a response, as they go over the wire. `params` makes the names of fields for errors.

    Raises the client's errors before the first event. A failure after it is told by the event
    "response.failed", which is then the last one.
    """
    writer = ResponseWriter(asked)
    async with aclosing(stream):
        try:
            async for event in stream:
                if said := writer.feed(event):
                    yield said.encode()
        except (PenstockClientError, ApiError) as error:
            if writer.response is None:
                raise
            failure = error if isinstance(error, ApiError) else of_client_error(error, params())
            yield writer.fail(failure).encode()
