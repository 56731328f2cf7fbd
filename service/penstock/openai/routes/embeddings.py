"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.client import Embedding, Embeddings
from penstock.openai.calls import call_of
from penstock.openai.endpoints import name_params
from penstock.openai.front import front_of
from penstock.openai.jsonbytes import json_bytes
from penstock.openai.reading import read_body
from penstock.openai.replying import answered
from penstock.openai.schemas.completions import EmbeddingBody, prompts_of


async def embeddings_answer(made: Embeddings, encoding: str) -> bytes:
    """Write the body of the answer. A million numbers take a second to write, so a thread does it."""
    return await asyncio.to_thread(_body, made, encoding)


def _body(made: Embeddings, encoding: str) -> bytes:
    tokens = made.usage.prompt_tokens
    return json_bytes(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": _written(one, encoding)}
                for i, one in enumerate(made.embeddings)
            ],
            "model": made.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def _written(embedding: Embedding, encoding: str) -> Any:
    return list(embedding.numbers) if encoding == "float" else base64.b64encode(embedding.values).decode()


PREFIX = "embd"


async def embed(request: Request) -> Response:
    """Make a vector of each input."""
    call, body, backend = call_of(request), await read_body(request, EmbeddingBody), front_of(request).backend
    name_params(request.scope, lambda: params_of(body.input))
    facts = await backend.facts(call)
    asked = backend.client.embed(
        prompts_of(body.input),
        **facts.asked_for(body.model),
        dimensions=body.dimensions,
        priority=None if body.priority is None else -body.priority,
        request_id=call.answer_id(PREFIX),
        timeout=call.timeout,
        metadata=call.metadata,
    )
    made = await answered(request, asked)
    answer = await embeddings_answer(made, body.encoding_format or "float")
    return Response(answer, media_type="application/json")


def params_of(given: Any) -> dict[str, str]:
    """Map the contract's path of a field to the name of the field of a request that it was made of, for the
    `input` that it was given.
    """
    params = {"input": "input", "inputs": "input", "adapter": "model"}
    is_one = isinstance(given, str) or isinstance(given[0], int)
    for i in range(len(prompts_of(given))):
        name = "input" if is_one else f"input[{i}]"
        at = f"inputs[{i}]"
        params |= {at: name, f"{at}.text": name, f"{at}.token_ids": name, f"{at}.token_ids.ids": name}
    return params
