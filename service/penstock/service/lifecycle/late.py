"""Servicers that come after the server has started.

gRPC wants to know all methods before it starts, but those of the contract need an engine, and the server
answers health checks long before there is one. So gRPC gets a stand-in that looks for the servicer in each
call.
"""

from __future__ import annotations

import functools
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from penstock.runtime.errors import NotReady


class LateServicer:
    """Has the methods of a service, which raise NotReady until the servicer is there.

    Each is a plain function that returns what the servicer's method returns, a coroutine or an async
    generator. So it must be called inside of an interceptor that awaits either.
    """

    def __init__(self, service: ServiceDescriptor) -> None:
        self._servicer: Any = None
        for method in service.methods:
            setattr(self, method.name, functools.partial(self._call, method.name))

    def bind(self, servicer: Any) -> None:
        """From now on calls go there."""
        self._servicer = servicer

    def _call(self, method: str, request: Any, context: Any) -> Any:
        if self._servicer is None:
            raise NotReady
        return getattr(self._servicer, method)(request, context)
