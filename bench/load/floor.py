"""A bare grpc.aio server: what grpcio itself takes for each message, without anything of ours.

    python -m bench.load.floor

Its one method writes messages as long as a delta of two tokens. A thread wakes all streams at once, as the
engine does after each step.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from typing import Any

import grpc

METHOD = "/bench.Floor/Stream"
MESSAGE = bytes(24)
"""As long as a StreamResponse with some text and two token ids."""
MESSAGES = 56
"""Messages of one stream."""


async def serve(period_s: float) -> None:
    """Serve until the process is ended. Streams are woken once in `period_s` seconds."""
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.Future[None]] = []

    async def handle(request: bytes, context: Any) -> None:
        for _ in range(MESSAGES):
            turn = loop.create_future()
            waiting.append(turn)
            await turn
            await context.write(MESSAGE)

    def step() -> None:
        woken = list(waiting)
        waiting.clear()
        for turn in woken:
            if not turn.done():
                turn.set_result(None)

    def steps() -> None:
        while True:
            time.sleep(period_s)
            loop.call_soon_threadsafe(step)

    server = grpc.aio.server()
    service, method = METHOD.lstrip("/").split("/")
    handler: Any = grpc.unary_stream_rpc_method_handler(handle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready on 127.0.0.1:{port}", flush=True)
    threading.Thread(target=steps, daemon=True).start()
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load.floor", description=__doc__.splitlines()[0])
    parser.add_argument("--period", type=float, default=0.01, metavar="S", help="default: %(default)s")
    asyncio.run(serve(parser.parse_args().period))


if __name__ == "__main__":
    main()
