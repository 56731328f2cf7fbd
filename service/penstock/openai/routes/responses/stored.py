"""Responses that are kept: how a request goes on from one, and GET and DELETE of /v1/responses/ID.

What is kept of a response is the whole conversation that it answers, so each goes on by itself, whether or
not earlier ones are still there.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from penstock.openai.calls import call_of
from penstock.openai.failures import (
    INVALID,
    ApiError,
    invalid_value,
    unsupported_parameter,
    unsupported_value,
)
from penstock.openai.front import Front, front_of
from penstock.openai.jsonbytes import json_bytes
from penstock.openai.reading import INLINE_BYTES
from penstock.openai.replying import answered, json_response
from penstock.openai.routes.files import page_of, read_limit, read_query
from penstock.openai.routes.responses.turns import PREVIOUS
from penstock.openai.schemas.responses import MAX_ITEMS, Item, ItemReference, MessageItem, ReasoningItem
from penstock.openai.store import Kept, ResponseStore

_ITEMS: Final = TypeAdapter(list[Item])
_PREFIXES: Final = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_Input = str | Sequence[Item]
_ID_OF_ITEM: Final = re.compile(r"[a-z]+_(.+)[0-9a-f]{4}")
"""The id of an item that an answer has (`OutputItems`), with what the id of its response is made of."""
_OFF: Final = "responses are not kept: start the front with --store"
_PAGE: Final = 20
_MOST_PER_PAGE: Final = 100

_INCLUDED: Final = ("message.output_text.logprobs", "reasoning.encrypted_content")
_INCLUDE: Final[Mapping[str, Any]] = {
    name: {"type": "array", "items": {"enum": list(_INCLUDED)}}
    for name in ("include", "include[]")  # OpenAI's clients write the brackets
}
"""What has been kept is shown in any case, so these add nothing."""
QUERY_OF_ONE: Final[Mapping[str, Any]] = {
    **_INCLUDE,
    "include_obfuscation": {"type": "boolean"},
    "stream": {"enum": [False]},
}
QUERY_OF_ITEMS: Final[Mapping[str, Any]] = {
    **_INCLUDE,
    "after": {"type": "string", "description": "The id of the last item of the page before."},
    "limit": {"type": "integer", "minimum": 1, "maximum": _MOST_PER_PAGE, "default": _PAGE},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
}
"""The parameters of the queries."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The items of earlier responses, which a request goes on from."""

    items: Sequence[Item] = ()
    written: Sequence[Mapping[str, Any]] = ()
    """The same as they are kept."""


async def previous_of(front: Front, key: str, response_id: str | None) -> Conversation:
    """Return the conversation up to a response of the caller with this key, its own items included. Raises
    ApiError if there is no such response or it is too long to go on from, and where none are kept.
    """
    if response_id is None:
        return Conversation()
    if front.store is None:
        raise unsupported_parameter(PREVIOUS, f"{_OFF}, or send the items of the conversation as input.")
    kept = await front.store.find(key, response_id)
    if kept is None:
        message = f"Previous response with id '{response_id[:200]}' not found."
        raise ApiError(400, message, INVALID, PREVIOUS, "previous_response_not_found")
    num_bytes = len(kept.items) + len(kept.response)
    if num_bytes > front.settings.max_body_bytes:  # so what is kept cannot grow without end
        message = f"the conversation has more than the {front.settings.max_body_bytes} bytes of a body"
        raise ApiError(413, message, INVALID, PREVIOUS, "body_too_large")
    if num_bytes <= INLINE_BYTES:
        return _read(kept)
    async with front.heavy:
        return await asyncio.to_thread(_read, kept)


def _read(kept: Kept) -> Conversation:
    written = [*json.loads(kept.items), *json.loads(kept.response)["output"]]
    return Conversation(_ITEMS.validate_python(written), written)


async def without_references(front: Front, key: str, items: _Input) -> _Input:
    """Return the items, with what the caller with this key has kept in place of references to it. Where
    nothing is kept they stay, and are refused. Raises ApiError for what there is not.
    """
    if front.store is None or isinstance(items, str):
        return items
    known: dict[str, Item] = {}
    looked_into: set[str] = set()
    left = front.settings.max_body_bytes
    for i, item in enumerate(items):
        if not isinstance(item, ItemReference) or item.id in known:
            continue
        found = _ID_OF_ITEM.fullmatch(item.id)
        response_id = "" if found is None else f"resp_{found[1]}"
        if response_id not in looked_into and (kept := await front.store.find(key, response_id)) is not None:
            looked_into.add(response_id)
            left -= len(kept.response)
            if left < 0:
                raise ApiError(413, "the items have more bytes than a body may have", code="body_too_large")
            known |= await asyncio.to_thread(_output_of, kept)
        if item.id not in known:
            raise ApiError(404, f"Item with id '{item.id[:200]}' not found.", param=f"input[{i}].id")
    return [known[item.id] if isinstance(item, ItemReference) else item for item in items]


def _output_of(kept: Kept) -> dict[str, Item]:
    """Return the items that the model wrote, by their ids."""
    written = json.loads(kept.response)["output"]
    items = _ITEMS.validate_python(written)
    return {made["id"]: item for made, item in zip(written, items, strict=True)}


def check_sizes(previous: Conversation, items: _Input) -> None:
    """Raise ApiError if the whole conversation has more items than a request may have."""
    if not isinstance(items, str) and len(previous.items) + len(items) > MAX_ITEMS:
        raise invalid_value("input", f"together with the earlier items it has more than {MAX_ITEMS}.")


def kept_of(response: str, previous: Conversation, items: _Input, number: str) -> Kept:
    """Return what is kept of a response that answers these items. `number` makes the ids of items that have
    none.
    """
    if isinstance(items, str):
        items = [MessageItem(role="user", content=items)]
    written = [*previous.written, *(_written(item, f"{number}in{i:04x}") for i, item in enumerate(items))]
    return Kept(response.encode(), json_bytes(written))


def _written(item: Item, number: str) -> dict[str, Any]:
    """Write an item as OpenAI's API lists it: with an id, its type, and the parts of its content."""
    made = {"type": "message", **item.model_dump(by_alias=True, exclude_none=True)}
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        made["content"] = [{"type": kind, "text": item.content}]
    if isinstance(item, MessageItem) and item.role == "assistant":
        made["content"] = [
            {"annotations": [], **part} if part["type"] == "output_text" else part for part in made["content"]
        ]
    if isinstance(item, ReasoningItem):
        made = {"summary": [], **made}
    return {"id": f"{_PREFIXES[made['type']]}_{number}", "status": "completed", **made}


async def show_response(request: Request) -> Response:
    """Serve GET /v1/responses/ID."""
    if _query(request).get("stream") not in (None, "false"):
        raise unsupported_value("stream", "the events of a response are not kept.")
    kept = await _kept(request)
    return Response(kept.response, media_type="application/json")


async def delete_response(request: Request) -> Response:
    """Serve DELETE /v1/responses/ID."""
    _query(request)
    store, key, response_id = await _asked(request)
    if not await store.forget(key, response_id):
        raise _not_found(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(request: Request) -> Response:
    """Serve GET /v1/responses/ID/input_items."""
    asked = _query(request)
    limit, order = read_limit(asked, _PAGE, _MOST_PER_PAGE), asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_value("order", 'it must be "asc" or "desc".')
    kept = await _kept(request)
    return Response(
        await asyncio.to_thread(_page, kept.items, asked.get("after"), limit, order),
        media_type="application/json",
    )


def _page(written: bytes, after: str | None, limit: int, order: str) -> bytes:
    """Write the JSON of a page of the items."""
    items = json.loads(written)
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [i for i, item in enumerate(items, 1) if item["id"] == after]
        if not places:
            raise invalid_value("after", "none of the items has this id.")
        items = items[places[0] :]
    page = items[:limit]
    return json_bytes(page_of(page, len(items) > len(page)))


def _query(request: Request) -> Mapping[str, str]:
    """Read what the query asks for. Raises ApiError also for what cannot be included."""
    for value in (value for name in _INCLUDE for value in request.query_params.getlist(name)):
        if value not in _INCLUDED:
            raise unsupported_value("include", f"there is no {value[:80]!r} to be included.")
    return read_query(request)


async def _kept(request: Request) -> Kept:
    store, key, response_id = await _asked(request)
    kept = await store.find(key, response_id)
    if kept is None:
        raise _not_found(response_id)
    return kept


async def _asked(request: Request) -> tuple[ResponseStore, str, str]:
    """Return the store, the caller's key and the id of the response. The server is asked each time whether it
    takes the key, as at /v1/models. Raises ApiError where nothing is kept, and the client's errors.
    """
    call, front, response_id = call_of(request), front_of(request), request.path_params["response_id"]
    await answered(request, front.backend.facts(call, fresh=True))
    if front.store is None:
        raise ApiError(404, f"{_OFF}.", code="response_not_found")
    return front.store, call.key, response_id


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id[:200]}' not found.", code="response_not_found")
