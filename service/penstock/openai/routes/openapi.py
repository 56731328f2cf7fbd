"""The description of all endpoints for programs, as OpenAPI has it."""

from __future__ import annotations

import importlib.metadata

from starlette.requests import Request
from starlette.responses import Response

from penstock.openai.describing.document import document
from penstock.openai.jsonbytes import json_bytes


async def openapi(request: Request) -> Response:
    """GET /openapi.json. It needs no key. It is made when it is first asked for."""
    state = request.app.state
    if not hasattr(state, "openapi"):
        version = importlib.metadata.version("penstock")
        state.openapi = json_bytes(document(state.endpoints, version))
    return Response(state.openapi, media_type="application/json")
