"""Servicers that are bound after the server has started.

gRPC must know all methods before it starts. The contract's methods need an engine, and the server answers
health checks long before it has one. So gRPC gets a stand-in that looks for the servicer at each call.
"""

from __future__ import annotations

import functools
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from penstock.runtime.errors import NotReady


class LateServicer:
    """Has the methods of a service, which raise NotReady until a servicer is bound.

    Each method is a plain function that returns what the servicer's method returns: a coroutine or an async
    generator. It must be called inside an interceptor that handles either.
    """

    def __init__(self, service: ServiceDescriptor) -> None:
        self._servicer: Any = None
        for method in service.methods:
            setattr(self, method.name, functools.partial(self._call, method.name))

    def bind(self, servicer: Any) -> None:
        """Pass calls to this servicer from now on."""
        self._servicer = servicer

    def _call(self, method: str, request: Any, context: Any) -> Any:
        if self._servicer is None:
            raise NotReady
        return getattr(self._servicer, method)(request, context)
