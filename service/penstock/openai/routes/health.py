"""Whether requests are taken, for load balancers and people."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.openai.front import front_of
from penstock.openai.replying import json_response


async def health(request: Request) -> Response:
    """200 while the server's health is SERVING; 503 while it is not, and while the front drains. It needs no
    key.
    """
    front = front_of(request)
    if front.life.is_draining:
        return json_response({"status": "draining"}, 503)
    if not await front.backend.is_ready():
        return json_response({"status": "unavailable"}, 503)
    return json_response({"status": "ok"})
