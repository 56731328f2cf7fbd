"""A collector that takes OTLP over gRPC and drops it without decoding, for `bench.probes.watching`. It prints
its address, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

SERVICES = (
    "opentelemetry.proto.collector.trace.v1.TraceService",
    "opentelemetry.proto.collector.metrics.v1.MetricsService",
)


async def drop(message: bytes, context: Any) -> bytes:
    """Answer that all was taken: an empty message says so."""
    return b""


async def main() -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 * 2**20)])
    handlers: dict[str, Any] = {"Export": grpc.unary_unary_rpc_method_handler(drop)}
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, handlers) for name in SERVICES)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"ready on 127.0.0.1:{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
