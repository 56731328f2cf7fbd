"""The served model, as a list of one. The server is asked each time, so callers need a key if it has keys."""

from __future__ import annotations

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
    return json_response({"object": "list", "data": [_model(facts)]})


async def show_model(request: Request) -> Response:
    """GET /v1/models/{model}."""
    facts = await _facts(request)
    wanted = request.path_params["model"]
    if wanted != facts.model:
        raise ApiError(
            404, f"the model {wanted[:200]!r} is not served here", param="model", code="model_not_found"
        )
    return json_response(_model(facts))


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
