"""Makes the answer of /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from penstock.client import Embedding, Embeddings
from penstock.openai.jsonbytes import json_bytes


async def embeddings_answer(made: Embeddings, encoding: str) -> bytes:
    """The body of the answer. A million numbers take a second to write, so a thread does it."""
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
