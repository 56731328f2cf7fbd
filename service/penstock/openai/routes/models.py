"""The served model and its adapters, in the form of the API that the caller speaks. The server is asked each
time, so callers need a key if it has keys.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from penstock.client import Adapter
from penstock.openai.backend import ModelFacts
from penstock.openai.calls import call_of
from penstock.openai.failures import ApiError
from penstock.openai.front import front_of
from penstock.openai.replying import answered, json_response

IMAGES: Final = "images"
"""The client's name of the feature that a model takes images."""


async def list_models(request: Request) -> Response:
    """Serve GET /v1/models."""
    facts, adapters = await _facts(request), await _adapters(request)
    if call_of(request).is_anthropic:
        is_beyond = bool({"after_id", "before_id"} & request.query_params.keys())
        return json_response(_page(facts, adapters, is_beyond=is_beyond))
    return json_response(
        {"object": "list", "data": [_model(facts), *(_adapter(facts, one) for one in adapters)]}
    )


async def show_model(request: Request) -> Response:
    """Serve GET /v1/models/{model}."""
    facts = await _facts(request)
    wanted, is_anthropic = request.path_params["model"], call_of(request).is_anthropic
    if wanted == facts.model:
        return json_response(_anthropic_model(facts, wanted) if is_anthropic else _model(facts))
    for one in await _adapters(request):
        if one.name == wanted:
            return json_response(_anthropic_model(facts, wanted) if is_anthropic else _adapter(facts, one))
    raise ApiError(
        404, f"the model {wanted[:200]!r} is not served here", param="model", code="model_not_found"
    )


async def _facts(request: Request) -> ModelFacts:
    return await answered(request, front_of(request).backend.facts(call_of(request), fresh=True))


async def _adapters(request: Request) -> Sequence[Adapter]:
    return await answered(request, front_of(request).backend.adapters(call_of(request)))


def _adapter(facts: ModelFacts, adapter: Adapter) -> dict[str, Any]:
    """Describe an adapter; as in vLLM's list, `parent` is the model that the adapter changes."""
    return {**_model(facts), "id": adapter.name, "parent": facts.model}


def _model(facts: ModelFacts) -> dict[str, Any]:
    return {
        "id": facts.model,
        "object": "model",
        "created": facts.created,
        "owned_by": "penstock",
        "max_model_len": facts.max_context_tokens,
        "input_modalities": ["text", "image"] if IMAGES in facts.features else ["text"],
    }


def _page(facts: ModelFacts, adapters: Sequence[Adapter], *, is_beyond: bool) -> dict[str, Any]:
    """Make a page of the list in Anthropic's API, which has all of it. What is before or after is empty."""
    names = [] if is_beyond else [facts.model, *(one.name for one in adapters)]
    return {
        "data": [_anthropic_model(facts, name) for name in names],
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
        "has_more": False,
    }


def _anthropic_model(facts: ModelFacts, name: str) -> dict[str, Any]:
    created = dt.datetime.fromtimestamp(facts.created, dt.UTC)
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": facts.max_context_tokens,
        "max_tokens": facts.max_context_tokens,
    }
