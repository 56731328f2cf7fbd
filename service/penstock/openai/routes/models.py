"""The served model, as a list of one, in the form of the API that the caller speaks. The server is asked each
time, so callers need a key if it has keys.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from penstock.openai.backend import ModelFacts
from penstock.openai.calls import call_of
from penstock.openai.failures import ApiError
from penstock.openai.front import front_of
from penstock.openai.replying import answered, json_response

IMAGES: Final = "images"
"""The client's name of the feature that a model takes pictures."""


async def list_models(request: Request) -> Response:
    """GET /v1/models."""
    facts = await _facts(request)
    if call_of(request).is_anthropic:
        return json_response(
            _page(facts, is_beyond=bool({"after_id", "before_id"} & request.query_params.keys()))
        )
    return json_response({"object": "list", "data": [_model(facts)]})


async def show_model(request: Request) -> Response:
    """GET /v1/models/{model}."""
    facts = await _facts(request)
    wanted = request.path_params["model"]
    if wanted != facts.model:
        raise ApiError(
            404, f"the model {wanted[:200]!r} is not served here", param="model", code="model_not_found"
        )
    return json_response(_anthropic_model(facts) if call_of(request).is_anthropic else _model(facts))


async def _facts(request: Request) -> ModelFacts:
    return await answered(request, front_of(request).backend.facts(call_of(request), fresh=True))


def _model(facts: ModelFacts) -> dict[str, Any]:
    return {
        "id": facts.model,
        "object": "model",
        "created": facts.created,
        "owned_by": "penstock",
        "max_model_len": facts.max_context_tokens,
        "input_modalities": ["text", "image"] if IMAGES in facts.features else ["text"],
    }


def _page(facts: ModelFacts, *, is_beyond: bool) -> dict[str, Any]:
    """A page of the list in Anthropic's API. What is before or after the only model is empty."""
    models = [] if is_beyond else [_anthropic_model(facts)]
    ends = facts.model if models else None
    return {"data": models, "first_id": ends, "last_id": ends, "has_more": False}


def _anthropic_model(facts: ModelFacts) -> dict[str, Any]:
    created = dt.datetime.fromtimestamp(facts.created, dt.UTC)
    return {
        "id": facts.model,
        "type": "model",
        "display_name": facts.model,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": facts.max_context_tokens,
        "max_tokens": facts.max_context_tokens,
    }
