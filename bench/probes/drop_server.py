"""A gRPC server that takes the messages of UpdateWeights and drops them, for `bench.probes.updates`: what
loopback, gRPC and protobuf allow. It prints its address, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from penstock.v1 import weights_pb2

Message = weights_pb2.UpdateWeightsRequest


async def drop(messages: AsyncIterator[Message], context: Any) -> weights_pb2.UpdateWeightsResponse:
    """Read every message."""
    received = 0
    async for message in messages:
        received += len(message.chunk.data)
    return weights_pb2.UpdateWeightsResponse(bytes_received=received)


async def main() -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 * 2**20)])
    handler = grpc.stream_unary_rpc_method_handler(
        drop,
        request_deserializer=Message.FromString,
        response_serializer=weights_pb2.UpdateWeightsResponse.SerializeToString,
    )
    service = "penstock.v1.InferenceService"
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"UpdateWeights": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"ready on 127.0.0.1:{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
