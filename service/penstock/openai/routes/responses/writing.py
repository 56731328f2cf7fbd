"""Makes the answer of /v1/responses: the object "response", whole, or the events of a stream, of which some
hold it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from penstock.client import (
    AsyncGenerationStream,
    Delta,
    Finish,
    Finished,
    Generation,
    PenstockClientError,
    SamplingDefaults,
    Started,
    StreamEvent,
    Summary,
    Usage,
    Vocabulary,
)
from penstock.openai.failures import ApiError
from penstock.openai.generation.frames import finish_reason
from penstock.openai.generation.logprobs import Bound, TextTokens, chat_logprobs
from penstock.openai.routes.responses.items import EventWriter, OutputItems, json_text
from penstock.openai.routes.responses.tools import custom_names, names_of
from penstock.openai.schemas.responses import (
    BuiltInTool,
    CustomTool,
    NamespaceTool,
    Other,
    ResponsesBody,
    TextFormat,
    Tool,
)

_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt", 413: "invalid_prompt"}
"""From a status of HTTP to the code of a response's error, of which OpenAI's API has few."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer is made with, beside what the server sends."""

    body: ResponsesBody
    number: str
    """What the ids of the response and of its items are made of: 32 hexadecimal digits, or the caller's own
    text.
    """
    created: int
    """When the request came, in seconds of Unix time."""
    defaults: SamplingDefaults
    carries_reasoning: bool = False
    is_kept: bool = False
    """Whether the response is kept once it has ended."""
    vocabulary: Vocabulary | None = None
    """What tokens look like; None unless log-probabilities were asked for."""

    @property
    def response_id(self) -> str:
        return f"resp_{self.number}"


def empty_response(asked: Asked, model: str) -> dict[str, Any]:
    """Make the response before the model has written anything, but for its list of items: what was asked for,
    and what is used where nothing was.
    """
    body, defaults = asked.body, asked.defaults
    return {
        "id": asked.response_id,
        "object": "response",
        "created_at": asked.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning is not None else None,
            "summary": None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": asked.is_kept,
        "temperature": _first(body.temperature, defaults.temperature, 1.0),
        "text": {"format": _format(body.text.format if body.text is not None else None)},
        "tool_choice": _choice(body),
        "tools": [_tool(tool) for tool in body.tools or () if not isinstance(tool, BuiltInTool)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _first(body.top_p, defaults.top_p, 1.0),
        "presence_penalty": _first(body.presence_penalty, defaults.presence_penalty, 0.0),
        "frequency_penalty": _first(body.frequency_penalty, defaults.frequency_penalty, 0.0),
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def ended_response(response: Mapping[str, Any], usage: Usage, *, is_whole: bool, now: int) -> dict[str, Any]:
    """Make the response after its last token, but for its items. One that a limit ended is not `is_whole`."""
    return {
        **response,
        "status": "completed" if is_whole else "incomplete",
        "completed_at": now if is_whole else None,
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "usage": _usage(usage),
    }


def failed_response(response: Mapping[str, Any], error: ApiError) -> dict[str, Any]:
    """Make the response after it failed, but for its items."""
    told = {
        "code": _ERROR_CODES.get(error.status, "server_error"),
        "message": error.message,
        "param": error.param,
        "type": error.type,
    }
    return {**response, "status": "failed", "completed_at": None, "error": told}


def with_items(response: Mapping[str, Any], items: Sequence[str]) -> str:
    """Write the JSON of the response with these items, which are JSON already."""
    return f'{json_text(response)[:-1]},"output":[{",".join(items)}]}}'


def _first(*values: float | None) -> float:
    """Return the first value that there is."""
    return next(value for value in values if value is not None)


def _usage(usage: Usage) -> dict[str, Any]:
    """Write the figures that the server counted, which are those of its ledger."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _format(form: TextFormat | None) -> dict[str, Any]:
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    return {
        "type": form.type,
        "name": form.name,
        "description": form.description,
        "schema": form.schema_,
        "strict": True,
    }


def _choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return choice.model_dump(exclude_none=True)


def _tool(tool: Tool) -> dict[str, Any]:
    assert not isinstance(tool, BuiltInTool | Other), "tools of other types were refused or passed over"
    if isinstance(tool, NamespaceTool):
        inner = [_tool(function) for function in tool.tools]
        return {"type": tool.type, "name": tool.name, "description": tool.description or "", "tools": inner}
    if isinstance(tool, CustomTool):
        form = {"type": "text"} if tool.format is None else tool.format.model_dump(exclude_none=True)
        return {"type": tool.type, "name": tool.name, "description": tool.description, "format": form}
    return {
        "type": tool.type,
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }


MOST_ENTRIES: Final = 125_000
"""How many log-probabilities a response may have, also in a stream: its last four events hold all of them."""


class ResponseWriter:
    """Writes the events of one response, and keeps the response."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._events = EventWriter()
        self._items = OutputItems(
            asked.number,
            self._events,
            carries_reasoning=asked.carries_reasoning,
            names=names_of(asked.body.tools),
            custom_tools=custom_names(asked.body.tools),
        )
        self._tokens: TextTokens | None = None
        if asked.vocabulary is not None:
            with_special = asked.body.skip_special_tokens is False
            self._tokens = TextTokens(asked.vocabulary, with_special=with_special)
        self._bound = Bound(MOST_ENTRIES, instead="ask for fewer")
        self._finish: Finish | None = None
        self._status = "in_progress"
        self._response: dict[str, Any] | None = None
        """The response but for its items; None before the server has taken the request."""

    @property
    def has_begun(self) -> bool:
        """Whether the server has taken the request."""
        return self._response is not None

    def response(self) -> str:
        """Write the JSON of the response, with the items that have ended."""
        assert self._response is not None, "the request has been taken"
        return with_items(self._response, self._items.items)

    def feed(self, event: StreamEvent) -> str:
        """Write the events that tell of one of the server's; empty where nothing is to be told. After the
        last one come those of `last`.

        Raises ApiError if the output was aborted, and for too many log-probabilities.
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
        """Write the first events, for a request that the server has taken."""
        self._response = empty_response(self._asked, model)
        return self._told("created") + self._told("in_progress")

    def add(self, delta: Delta) -> str:
        """Write the events of what was added to the output."""
        said = ""
        for piece in delta.tool_call_deltas:
            if not piece.name:  # it goes on with a call that was made before all else in this delta
                said += self._items.call_piece(piece)
        if delta.reasoning:
            said += self._items.reasoning(delta.reasoning)
        entries = self._of_text(delta)
        if delta.delta:
            said += self._items.text(delta.delta, entries)
        for piece in delta.tool_call_deltas:
            if piece.name:
                said += self._items.call_piece(piece)
        for call in delta.tool_calls:
            said += self._items.call(call)
        return said

    def end(self, finish: Finish, usage: Usage) -> str:
        """Write the events of an output that has ended, but for the last one. Raises ApiError if it was
        aborted.
        """
        assert self._response is not None, "the request has been taken"
        is_whole = finish_reason(finish) == "stop"
        self._status = "completed" if is_whole else "incomplete"
        said = self._items.text("") if self._items.is_empty else ""
        said += self._items.end(self._status)
        self._response = ended_response(self._response, usage, is_whole=is_whole, now=int(time.time()))
        return said

    def last(self) -> str:
        """Write the last event of a response that has ended."""
        return self._told(self._status)

    def fail(self, error: ApiError) -> str:
        """Write the last events of a response that failed after it had begun."""
        assert self._response is not None, "the request has been taken"
        said = self._items.end("incomplete")
        self._response = failed_response(self._response, error)
        return said + self._told("failed")

    def _told(self, kind: str) -> str:
        """Write an event that holds the response."""
        return self._events.written(kind, f'"response":{self.response()}')

    def _of_text(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens that the delta's text is made of."""
        vocabulary = self._asked.vocabulary
        if vocabulary is None or self._tokens is None:
            return []
        self._bound.take(delta.logprobs)
        told = self._tokens.of_delta(delta)
        return [] if told.logprobs is None else chat_logprobs(told.logprobs, told.token_ids, vocabulary)


def whole_response(answer: Generation, asked: Asked) -> str:
    """Write the JSON of the response to a request that does not stream. Raises ApiError if the output was
    aborted.
    """
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
    return writer.response()


async def read_response(stream: AsyncGenerationStream, asked: Asked) -> str:
    """Do the same as `whole_response`, for an answer with log-probabilities, which may be large: it is made
    of a stream's small messages, so that other requests are served meanwhile. Raises the client's errors too,
    and ApiError for too many log-probabilities.
    """
    writer = ResponseWriter(asked)
    async with aclosing(stream):
        async for event in stream:
            writer.feed(event)
    return writer.response()


async def response_events(
    stream: AsyncGenerationStream,
    asked: Asked,
    late: Callable[[PenstockClientError | ApiError], ApiError],
    keep: Callable[[str], Awaitable[None]],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a response, as they go over the wire. `late` makes what the client is told of an
    error, and `keep` is given the JSON of the response before the last event tells that it is whole.

    Raises the client's errors before the first event. A failure after it is told by the event
    "response.failed", which is then the last one.
    """
    writer = ResponseWriter(asked)
    async with aclosing(stream):
        try:
            async for event in stream:
                if said := writer.feed(event):
                    yield said.encode()
            await keep(writer.response())
            yield writer.last().encode()
        except (PenstockClientError, ApiError) as error:
            if not writer.has_begun:
                raise
            yield writer.fail(late(error)).encode()
