"""What the front measures, for Prometheus."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from penstock.openai.front import front_of


async def metrics(request: Request) -> Response:
    """The metrics of all workers in Prometheus' text format. It needs no key."""
    return Response(front_of(request).meters.page(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})
