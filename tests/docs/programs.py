"""Programs that the pages' shell blocks call, where a test needs them to behave a little differently.

`python -m tests.docs.programs penstock ...` is the command line itself, except for `serve`: that starts the
server on a fake engine in the background and returns when it is ready, as if it ran in another terminal. A
server that the page started before is stopped first. A page that only ever starts servers without options is
given the address of one that runs already, and then `serve` does nothing. With PAGE_ENGINE=demo the server
has the demo model. PAGE_FOLDER names the folder that remembers the server of a page that works in several.
`python -m tests.docs.programs grpcurl ...` does what grpcurl would, for flags of the pages that `make test`
runs, which must do without Go. The sweep runs all lines of grpcurl with grpcurl itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock.cli.__main__ import main
from penstock.v1 import control_pb2, inference_pb2
from tests.support.models.toy import TEST_CACHE

START_S = 280.0


def serve(arguments: Sequence[str]) -> int:
    """`penstock serve MODEL ARGUMENTS`, in the background."""
    if not os.environ["PAGE_PORT"]:
        return 0
    folder = Path(os.environ.get("PAGE_FOLDER", "."))
    stop_server(folder)
    program = ["tests.service.serve_fake"]
    if os.environ.get("PAGE_ENGINE") == "demo":
        program = ["penstock.cli", "serve", "demo", "--compilation-cache", str(TEST_CACHE)]
    flags = list(arguments[1:])
    if "--port" not in flags:
        flags += ["--port", os.environ["PAGE_PORT"]]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-u", "-m", *program, *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    (folder / "server.pid").write_text(str(server.pid))
    give_up_at = time.monotonic() + START_S
    while "ready on" not in (said := (folder / "server.log").read_text()):
        if server.poll() is not None or time.monotonic() > give_up_at:
            print(said, file=sys.stderr)
            return 1
        time.sleep(0.05)
    return 0


def stop_server(folder: Path = Path()) -> None:
    """End the server that was started in this folder, if there is one."""
    file = folder / "server.pid"
    if not file.exists():
        return
    pid = int(file.read_text())
    file.unlink()
    if _runs(pid):
        os.kill(pid, signal.SIGTERM)
    give_up_at = time.monotonic() + 60
    while _runs(pid):
        if time.monotonic() > give_up_at:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether the process has not ended. A process that ended and was not waited for counts as running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def grpcurl(arguments: Sequence[str]) -> int:
    """Call a method. Returns 0, or 1 with the status on stderr, as grpcurl does."""
    parser = argparse.ArgumentParser(prog="grpcurl")
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-d", default="{}")
    parser.add_argument("address")
    parser.add_argument("what")
    parser.add_argument("symbol", nargs="?")
    asked = parser.parse_args(arguments)
    with grpc.insecure_channel(asked.address) as channel:
        try:
            if asked.what in ("list", "describe"):
                print(_reflected(channel, asked.symbol))
            else:
                _call(channel, asked.what, asked.d)
        except grpc.RpcError as failed:
            error: Any = failed
            print(f"ERROR:\n  Code: {error.code().name}\n  Message: {error.details()}", file=sys.stderr)
            return 1
    return 0


def _reflected(channel: grpc.Channel, symbol: str | None) -> str:
    """The names of the services, or where the symbol is defined."""
    ask = reflection_pb2.ServerReflectionRequest
    request = ask(file_containing_symbol=symbol) if symbol else ask(list_services="")
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    reply = next(iter(stub.ServerReflectionInfo(iter([request]))))
    if reply.HasField("error_response"):
        raise SystemExit(reply.error_response.error_message)
    if not symbol:
        return "\n".join(service.name for service in reply.list_services_response.service)
    file = descriptor_pb2.FileDescriptorProto.FromString(
        reply.file_descriptor_response.file_descriptor_proto[0]
    )
    return f"{symbol} is in {file.name}"


def _call(channel: grpc.Channel, path: str, data: str) -> None:
    service_name, _, method_name = path.partition("/")
    service: ServiceDescriptor = descriptor_pool.Default().FindServiceByName(service_name)
    method = service.methods_by_name[method_name]
    request = json_format.Parse(data, message_factory.GetMessageClass(method.input_type)())
    kind = channel.unary_stream if method.server_streaming else channel.unary_unary
    call: Any = kind(
        f"/{path}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    reply = call(request, timeout=60)
    for message in reply if method.server_streaming else [reply]:
        print(json.dumps(json_format.MessageToDict(message), indent=2))


PACKAGES = (control_pb2, inference_pb2, health_pb2)
"""Imported so that their services can be found by name."""

if __name__ == "__main__":
    program, *rest = sys.argv[1:]
    if program == "grpcurl":
        sys.exit(grpcurl(rest))
    if rest[:1] == ["serve"] and not {"--help", "-h"} & set(rest):
        sys.exit(serve(rest[1:]))
    sys.exit(main(rest))
