"""The service config of docs/how-to/other-languages.md, in gRPC's own channel."""

from __future__ import annotations

import json
from typing import Any

import grpc

from penstock.v1 import control_pb2, control_pb2_grpc
from tests.docs.pages import ROOT, blocks


def service_config() -> str:
    (config,) = [
        block.source
        for block in blocks()
        if block.language == "json"
        and block.page.name == "other-languages.md"
        and "retryPolicy" in block.source
    ]
    return config


class Refusing:
    """Answers GetLoad with this status until the third attempt."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.code = code
        self.attempts = 0

    async def get_load(self, request: Any, context: Any) -> control_pb2.GetLoadResponse:
        self.attempts += 1
        if self.attempts < 3:
            await context.abort(self.code, "not now")
        return control_pb2.GetLoadResponse(running_requests=7)

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        handler = grpc.unary_unary_rpc_method_handler(
            self.get_load,
            request_deserializer=control_pb2.GetLoadRequest.FromString,
            response_serializer=control_pb2.GetLoadResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler("penstock.v1.ControlService", {"GetLoad": handler})


async def attempts_of(code: grpc.StatusCode) -> tuple[grpc.StatusCode, int]:
    """How a call ends whose first attempts end with `code`, and after how many attempts."""
    server, servicer = grpc.aio.server(), Refusing(code)
    server.add_generic_rpc_handlers((servicer.handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.service_config", service_config())]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            stub: Any = control_pb2_grpc.ControlServiceStub(channel)
            call = stub.GetLoad(control_pb2.GetLoadRequest(), timeout=60)
            return await call.code(), servicer.attempts
    finally:
        await server.stop(None)


async def test_only_unavailable_is_tried_again() -> None:
    assert await attempts_of(grpc.StatusCode.UNAVAILABLE) == (grpc.StatusCode.OK, 3)
    for final in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL):
        assert await attempts_of(final) == (final, 1)


def test_it_is_the_policy_of_the_go_client() -> None:
    """The Go client has it as a text; both say the same."""
    source = (ROOT / "clients" / "go" / "dial.go").read_text()
    policy = json.loads(service_config())["methodConfig"][0]["retryPolicy"]
    text = "".join(source.split())
    for name, value in policy.items():
        assert f'"{name}":{json.dumps(value)}' in text, name
