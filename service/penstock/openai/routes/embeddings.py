"""POST /v1/embeddings."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.openai.answers.embeddings import embeddings_answer
from penstock.openai.calls import call_of
from penstock.openai.endpoints import name_params
from penstock.openai.front import front_of
from penstock.openai.reading import read_body
from penstock.openai.replying import answered
from penstock.openai.schemas.completions import prompts_of
from penstock.openai.schemas.embeddings import EmbeddingBody

PREFIX = "embd"


async def embed(request: Request) -> Response:
    """Make a vector of each input."""
    call, body, backend = call_of(request), await read_body(request, EmbeddingBody), front_of(request).backend
    name_params(request.scope, lambda: _params(body))
    asked = backend.client.embed(
        prompts_of(body.input),
        model=body.model,
        dimensions=body.dimensions,
        request_id=call.answer_id(PREFIX),
        timeout=call.timeout,
        metadata=call.metadata,
    )
    made = await answered(request, asked)
    answer = await embeddings_answer(made, body.encoding_format or "float")
    return Response(answer, media_type="application/json")


def _params(body: EmbeddingBody) -> dict[str, str]:
    """From the contract's path of a field to the name of the field of this request that it was made of."""
    params = {"inputs": "input"}
    if isinstance(body.input, str) or isinstance(body.input[0], int):
        return params | {"inputs[0]": "input", "inputs[0].text": "input", "inputs[0].token_ids": "input"}
    for i in range(len(body.input)):
        params |= {f"inputs[{i}].text": f"input[{i}]", f"inputs[{i}].token_ids": f"input[{i}]"}
    return params
