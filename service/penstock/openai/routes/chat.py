"""POST /v1/chat/completions: the request's keyword arguments for the client, the answer, and its chunks."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Iterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.client import (
    AsyncGenerationStream,
    Delta,
    Finished,
    Generation,
    Output,
    RequestOptions,
    Started,
    Summary,
    ToolCall,
    ToolCallDelta,
)
from penstock.openai.backend import ModelFacts
from penstock.openai.calls import call_of
from penstock.openai.endpoints import ignored_in, name_params
from penstock.openai.failures import invalid_value
from penstock.openai.front import front_of
from penstock.openai.generation.frames import (
    DONE,
    Frame,
    UsageWanted,
    Wanted,
    finish_reason,
    stop_reason,
    usage_dict,
    usage_wanted,
)
from penstock.openai.generation.logprobs import (
    Bound,
    TextTokens,
    chat_logprobs,
    chat_logprobs_json,
    prompt_logprobs_json,
    read_whole,
    spliced,
)
from penstock.openai.generation.options import (
    constraint_field,
    form_beside_tools,
    requires_call,
    response_format_field,
    sampling_options,
    sampling_params,
)
from penstock.openai.jsonbytes import json_bytes, json_string
from penstock.openai.reading import read_body
from penstock.openai.replying import answered, sse
from penstock.openai.routes.custom_tools import InputPieces, input_of
from penstock.openai.routes.turns import (
    has_images,
    ignored_of,
    image_params,
    offered_of,
    template_options,
    turns_of,
    variables_of_effort,
)
from penstock.openai.schemas.chat import AllowedTools, ChatBody, CustomTool, CustomToolCall


def chat_options(body: ChatBody, facts: ModelFacts) -> RequestOptions:
    """Make the keyword arguments of `generate` or `stream`. Raises ApiError, with the field, for what the
    front can tell to be wrong; the rest is the server's to tell.
    """
    offered = offered_of(body.tools or (), body.tool_choice)
    options = sampling_options(body, facts)
    field = constraint_field(body, response_format_field(body))
    options["constraint"] = form_beside_tools(options["constraint"], field, offered.tools, offered.choice)
    options["messages"] = turns_of(body.messages)
    options["tools"] = offered.tools or None
    options["tool_choice"] = offered.choice
    options["parallel_tool_calls"] = body.parallel_tool_calls if offered.tools else None
    options["chat_template"] = body.chat_template
    options["template_options"] = template_options(
        body.reasoning_effort, facts.template_variables, body.chat_template_kwargs
    )
    options["max_tokens"] = _max_tokens(body)
    options["logprobs"] = _num_logprobs(body)
    if options["logprobs"] is not None:
        options["return_token_ids"] = True
    return options


def chat_ignored(body: ChatBody, facts: ModelFacts) -> set[str]:
    """Return the fields that have no effect, besides those that the body itself ignores."""
    ignored = ignored_of(body.messages, facts, body.chat_template)
    if body.reasoning_effort and not variables_of_effort(body.reasoning_effort, facts.template_variables):
        ignored.add("reasoning_effort")
    form, choice = body.response_format, body.tool_choice
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
    if form is not None and form.type != "text" and requires_call(mode):
        ignored.add("response_format")
    return ignored


def chat_params(body: ChatBody) -> dict[str, str]:
    """Map the contract's path of a field to the name of the field of this request that it was made of."""
    by_old_name = body.max_tokens is not None
    params = sampling_params(body) | {
        "input": "messages",
        "chat": "messages",
        "chat.messages": "messages",
        "chat.tools": "tools",
        "chat.tool_choice": "tool_choice",
        "chat.parallel_tool_calls": "parallel_tool_calls",
        "chat.chat_template": "chat_template",
        "chat.template_options_json": "chat_template_kwargs",
        "stopping.max_tokens": "max_tokens" if by_old_name else "max_completion_tokens",
        "output.logprobs": "top_logprobs",
    }
    for i, index in enumerate(offered_of(body.tools or (), body.tool_choice).indices):
        tool, made_of = f"chat.tools[{i}]", f"tools[{index}]"
        if body.tools is not None and isinstance(body.tools[index], CustomTool):
            custom = f"{made_of}.custom"
            params |= {f"{tool}.name": f"{custom}.name", f"{tool}.description": f"{custom}.description"}
            params |= {f"{tool}.parameters_json": f"{custom}.format", f"{tool}.strict": custom}
            continue
        for name in ("name", "description", "strict"):
            params[f"{tool}.{name}"] = f"{made_of}.function.{name}"
        params[f"{tool}.parameters_json"] = f"{made_of}.function.parameters"
    for i, message in enumerate(body.messages):
        for j in range(len(message.tool_calls or ())):
            call, made_of = f"chat.messages[{i}].tool_calls[{j}]", f"messages[{i}].tool_calls[{j}]"
            is_custom = isinstance((message.tool_calls or ())[j], CustomToolCall)
            params[f"{call}.name"] = f"{made_of}.{'custom' if is_custom else 'function'}.name"
    return params | image_params("messages", body.messages)


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid_value("max_tokens", "it is an older name of max_completion_tokens; give one of them.")
    return new if new is not None else old


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise invalid_value("top_logprobs", "it goes with logprobs: true.")
    return (body.top_logprobs or 0) if body.logprobs else None


async def chat_answer(answer: Generation, created: int, wanted: Wanted) -> bytes:
    """Write the JSON of `chat_completion`, with log-probabilities. Raises ApiError if an output was
    aborted.
    """
    made = chat_completion(answer, created, wanted)
    if wanted.vocabulary is None:
        return json_bytes(made)
    choices = [{"logprobs": await chat_logprobs_json(output, wanted.vocabulary)} for output in answer.outputs]
    more = {}
    if answer.prompt.logprobs is not None:
        more["prompt_logprobs"] = await prompt_logprobs_json(answer.prompt, wanted.vocabulary)
    return spliced(made, more, choices)


def chat_completion(answer: Generation, created: int, wanted: Wanted) -> dict[str, Any]:
    """Make the object "chat.completion", without log-probabilities. Raises ApiError if an output was
    aborted.
    """
    made: dict[str, Any] = {
        "id": answer.request_id,
        "object": "chat.completion",
        "created": created,
        "model": answer.model,
        "choices": [_choice(output, wanted) for output in answer.outputs],
        "usage": usage_dict(answer.usage),
    }
    if wanted.token_ids:
        made["prompt_token_ids"] = answer.prompt.token_ids
    return made


def tool_call_dict(call: ToolCall, custom_tools: Collection[str] = ()) -> dict[str, Any]:
    """Make a call as it stands in a message. `custom_tools` are the names of the tools of that type."""
    if call.name in custom_tools:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": input_of(call)}}
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


def _choice(output: Output, wanted: Wanted) -> dict[str, Any]:
    calls = [tool_call_dict(call, wanted.custom_tools) for call in output.tool_calls]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": output.text if output.text or not calls else None,
        "refusal": None,
        "annotations": [],
    }
    if calls:
        message["tool_calls"] = calls
    if output.reasoning and wanted.reasoning:
        message["reasoning"] = output.reasoning
    choice: dict[str, Any] = {
        "index": output.index,
        "message": message,
        "logprobs": None,
        "finish_reason": finish_reason(output.finish, has_calls=bool(calls)),
        **stop_reason(output.finish),
    }
    if wanted.token_ids:
        choice["token_ids"] = output.token_ids
    return choice


async def chat_chunks(
    stream: AsyncGenerationStream, created: int, num_choices: int, wanted: Wanted, usage: UsageWanted
) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of the events that are sent, to the end of `stream`, which is closed in any case.
    Raises ApiError if an output was aborted, and what `stream` raises.
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
        self._inputs: dict[int, InputPieces] = {}
        """From a choice to the text for the custom tool that it is calling."""
        self._texts: defaultdict[int, TextTokens] | None = None
        """From a choice to what finds the tokens of its text; None where all tokens are told."""
        if wanted.text_tokens is not None:
            self._texts = defaultdict(wanted.text_tokens)

    def roles(self, started: Started, num_choices: int) -> Iterator[bytes]:
        """Yield the first chunk of each choice, which says who speaks."""
        for index in range(num_choices):
            choice = _chunk_choice(index, '"role":"assistant","content":"","refusal":null')
            if self._wanted.token_ids and index == 0:
                yield self.frame.first(choice, json_bytes(started.prompt.token_ids).decode())
            else:
                yield self.frame.chunk(choice)

    def delta(self, event: Delta) -> bytes | None:
        """Make the chunk of what was added to a choice; None if that is nothing to be sent."""
        has_calls = event.tool_calls or event.tool_call_deltas
        if self._is_plain and event.delta and not event.reasoning and not has_calls:
            return self.frame.chunk(_chunk_choice(event.index, f'"content":{json_string(event.delta)}'))
        if event.token_ids:
            self.frame.count(completion_tokens=len(event.token_ids))
        parts = []
        if event.reasoning and self._wanted.reasoning:
            parts.append(f'"reasoning":{json_string(event.reasoning)}')
        if event.delta:
            parts.append(f'"content":{json_string(event.delta)}')
        if has_calls:
            parts.append(f'"tool_calls":[{",".join(self._calls(event))}]')
        logprobs, ids = self._logprobs(event), ""
        if self._wanted.token_ids:
            ids = f',"token_ids":{json_bytes(event.token_ids).decode()}'
        if not parts and logprobs == "null" and not ids:
            return None
        return self.frame.chunk(_chunk_choice(event.index, ",".join(parts), logprobs, ids))

    def finished(self, event: Finished) -> bytes:
        """Make the last chunk of a choice. Raises ApiError if the output was aborted."""
        reason = finish_reason(event.finish, has_calls=event.index in self._num_calls)
        stopped = "".join(
            f',"{name}":{json_bytes(at).decode()}' for name, at in stop_reason(event.finish).items()
        )
        rest = ",".join(self._rest_of_input(event.index))
        delta = f'"tool_calls":[{rest}]' if rest else ""
        return self.frame.chunk(_chunk_choice(event.index, delta, "null", stopped, f'"{reason}"'))

    def _calls(self, event: Delta) -> Iterator[str]:
        """Yield the JSON of pieces of calls; and of whole ones, which servers send that know no pieces."""
        for piece in event.tool_call_deltas:
            if piece.name:
                yield from self._rest_of_input(event.index)
                yield self._begun(event.index, piece)
            elif event.index not in self._inputs:
                yield _call_piece(piece.index, "function", "arguments", piece.arguments_json)
            elif text := self._inputs[event.index].add(piece.arguments_json):
                yield _call_piece(piece.index, "custom", "input", text)
        for call in event.tool_calls:
            number = self._num_calls.get(event.index, 0)
            self._num_calls[event.index] = number + 1
            yield json_bytes({"index": number, **tool_call_dict(call, self._wanted.custom_tools)}).decode()

    def _begun(self, choice: int, piece: ToolCallDelta) -> str:
        """Write the JSON of the first piece of a call."""
        self._num_calls[choice] = piece.index + 1
        kind, field, value = "function", "arguments", piece.arguments_json
        if piece.name in self._wanted.custom_tools:
            self._inputs[choice] = InputPieces()
            kind, field, value = "custom", "input", self._inputs[choice].add(value)
        call = {"name": piece.name, field: value}
        return json_bytes({"index": piece.index, "id": piece.id, "type": kind, kind: call}).decode()

    def _rest_of_input(self, choice: int) -> Iterator[str]:
        """Yield the JSON of what is left of the text for a custom tool, whose call has ended."""
        pieces = self._inputs.pop(choice, None)
        if pieces is not None and (text := pieces.rest()):
            yield _call_piece(self._num_calls[choice] - 1, "custom", "input", text)

    def _logprobs(self, event: Delta) -> str:
        if self._texts is not None:
            event = self._texts[event.index].of_delta(event)
        if self._wanted.vocabulary is None or event.logprobs is None or not event.token_ids:
            return "null"
        content = chat_logprobs(event.logprobs, event.token_ids, self._wanted.vocabulary)
        return json_bytes({"content": content, "refusal": None}).decode()


def _call_piece(index: int, kind: str, field: str, text: str) -> str:
    """Write the JSON of a piece of a call that has begun."""
    return f'{{"index":{index},"{kind}":{{"{field}":{json_string(text)}}}}}'


def _chunk_choice(
    index: int, delta: str, logprobs: str = "null", more: str = "", reason: str = "null"
) -> str:
    """Write the JSON of a choice from the JSON of its parts."""
    return f'{{"index":{index},"delta":{{{delta}}},"logprobs":{logprobs},"finish_reason":{reason}{more}}}'


PREFIX = "chatcmpl"


async def chat(request: Request) -> Response:
    """Continue a conversation."""
    call, body, backend = call_of(request), await read_body(request, ChatBody), front_of(request).backend
    facts = await backend.facts(call)
    ignored_in(request.scope).update(chat_ignored(body, facts))
    if has_images(body.messages):
        # Base64 of megabytes is read in a thread, so that other requests do not wait for it.
        options = await asyncio.to_thread(chat_options, body, facts)
    else:
        options = chat_options(body, facts)
    name_params(request.scope, lambda: chat_params(body))
    options["request_id"] = f"{PREFIX}-{body.request_id or call.number}"
    needs_texts = body.logprobs or body.prompt_logprobs is not None
    vocabulary = await backend.vocabulary(call) if needs_texts else None
    wanted = Wanted(
        reasoning=body.include_reasoning is not False,
        token_ids=bool(body.return_token_ids),
        custom_tools=frozenset(tool.custom.name for tool in body.tools or () if isinstance(tool, CustomTool)),
        vocabulary=vocabulary,
        text_tokens=None
        if vocabulary is None or body.return_token_ids
        else partial(TextTokens, vocabulary, with_special=body.skip_special_tokens is False),
    )
    if body.stream:
        stream = backend.client.stream(
            tool_call_deltas=True, timeout=call.timeout, metadata=call.metadata, **options
        )
        chunks = chat_chunks(stream, call.created, body.n or 1, wanted, usage_wanted(body.stream_options))
        return await sse(request, chunks)
    if needs_texts:
        stream = backend.client.stream(timeout=call.timeout, metadata=call.metadata, **options)
        answer = await answered(request, read_whole(stream, Bound(), text_tokens=wanted.text_tokens))
    else:
        answer = await answered(
            request, backend.client.generate(timeout=call.timeout, metadata=call.metadata, **options)
        )
    return Response(await chat_answer(answer, call.created, wanted), media_type="application/json")
