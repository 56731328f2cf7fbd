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
    params = {"input": "input", "inputs": "input"}
    is_one = isinstance(body.input, str) or isinstance(body.input[0], int)
    for i in range(len(prompts_of(body.input))):
        name = "input" if is_one else f"input[{i}]"
        at = f"inputs[{i}]"
        params |= {at: name, f"{at}.text": name, f"{at}.token_ids": name, f"{at}.token_ids.ids": name}
    return params
