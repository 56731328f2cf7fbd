"""Makes the answer of /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import Any

from penstock.client import Embeddings
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
                {"object": "embedding", "index": i, "embedding": _written(one.values, encoding)}
                for i, one in enumerate(made.embeddings)
            ],
            "model": made.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def _written(values: Sequence[float], encoding: str) -> Any:
    if encoding == "float":
        return list(values)
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
