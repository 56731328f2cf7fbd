"""A server that stands in for Penstock where a test needs one that refuses or fails just then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no hints
from grpc_health.v1 import health, health_pb2_grpc
from grpc_status import rpc_status

from penstock.v1 import inference_pb2

FAILURE = "the engine has died"


class Server(grpc.GenericRpcHandler):
    """Answers Generate with its name, or refuses it as a server does that is about to end. Stream fails after
    its first message.
    """

    def __init__(self, name: str, *, is_draining: bool = False) -> None:
        self.name, self.is_draining, self.calls = name, is_draining, 0
        self.health = health.HealthServicer()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        if details.method == "/penstock.v1.InferenceService/Generate":
            return grpc.unary_unary_rpc_method_handler(self._generate)
        if details.method == "/penstock.v1.InferenceService/Stream":
            return grpc.unary_stream_rpc_method_handler(self._stream)
        return None

    def _generate(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.calls += 1
        if self.is_draining:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the server is about to end")
        return inference_pb2.GenerateResponse(model=self.name).SerializeToString()

    def _stream(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        started = inference_pb2.StreamStarted(model=self.name)
        yield inference_pb2.StreamResponse(started=started).SerializeToString()
        status = status_pb2.Status(code=grpc.StatusCode.INTERNAL.value[0], message=FAILURE)
        reason = error_details_pb2.ErrorInfo(reason="ENGINE_FAILURE", domain="penstock")
        status.details.add().Pack(reason)
        context.abort_with_status(rpc_status.to_status(status))

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """Serve on a port of its own. Gives the address."""
        server = grpc.server(ThreadPoolExecutor(8), handlers=[self])
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait(20)

    def say(self, status: int) -> None:
        """Answer questions for its health with this."""
        self.health.set("", status)
