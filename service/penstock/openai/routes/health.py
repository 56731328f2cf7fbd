"""Whether requests are taken, for load balancers and people, and what the front measures, for Prometheus."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from penstock.openai.front import front_of
from penstock.openai.replying import json_response


async def health(request: Request) -> Response:
    """Answer 200 while the server's health is SERVING; 503 while it is not, and while the front drains. It
    needs no key.
    """
    front = front_of(request)
    if front.life.is_draining:
        return json_response({"status": "draining"}, 503)
    if not await front.backend.is_ready():
        return json_response({"status": "unavailable"}, 503)
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Write the metrics of all workers in Prometheus' text format. It needs no key."""
    return Response(front_of(request).meters.page(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})
