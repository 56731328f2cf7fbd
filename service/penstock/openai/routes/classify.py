"""POST /classify, as vLLM has it: the classes of texts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.openai.calls import call_of
from penstock.openai.endpoints import name_params
from penstock.openai.front import front_of
from penstock.openai.reading import read_body
from penstock.openai.replying import answered, json_response
from penstock.openai.routes.embeddings import params_of
from penstock.openai.schemas.completions import ClassifyBody, prompts_of


async def classify(request: Request) -> Response:
    """Tell to which class each input belongs."""
    call, body, backend = call_of(request), await read_body(request, ClassifyBody), front_of(request).backend
    name_params(request.scope, lambda: params_of(body.input))
    asked = backend.client.classify(
        prompts_of(body.input),
        **(await backend.facts(call)).asked_for(body.model),
        priority=None if body.priority is None else -body.priority,
        request_id=call.answer_id("classify"),
        timeout=call.timeout,
        metadata=call.metadata,
    )
    made = await answered(request, asked)
    tokens = made.usage.prompt_tokens
    return json_response(
        {
            "id": made.request_id,
            "object": "list",
            "created": call.created,
            "model": made.model,
            "data": [
                {
                    "index": i,
                    "label": one.label or None,
                    "probs": list(one.probabilities or one.logits),
                    "num_classes": len(made.labels),
                }
                for i, one in enumerate(made.results)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )
