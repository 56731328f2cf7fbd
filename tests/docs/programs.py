"""Programs that the pages' shell blocks call, where a test needs them to behave a little differently.

`python -m tests.docs.programs penstock ...` is the command line itself, except for `serve`: that starts the
server on a fake engine in the background and returns when it is ready, as if it ran in another terminal. A
server that the page started before is stopped first. A page that only ever starts servers without options is
given the address of one that runs already, and then `serve` does nothing. With PAGE_ENGINE=demo the server
has the demo model. PAGE_FOLDER names the folder that remembers the server of a page that works in several.
`python -m tests.docs.programs grpcurl ...` does what grpcurl would for the README's line, because `make test`
must do without Go. The sweep runs all lines of grpcurl with grpcurl itself.
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
from google.protobuf import json_format

from penstock.cli.__main__ import main
from penstock.v1 import inference_pb2, inference_pb2_grpc
from tests.support.models.compilation_cache import TEST_CACHE

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
    """Say whether the process has not ended. A process that ended and was not waited for counts as
    running.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def grpcurl(arguments: Sequence[str]) -> int:
    """Call Stream. Returns 0, or 1 with the status on stderr, as grpcurl does."""
    parser = argparse.ArgumentParser(prog="grpcurl")
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-d", required=True)
    parser.add_argument("address")
    parser.add_argument("method", choices=["penstock.v1.InferenceService/Stream"])
    asked = parser.parse_args(arguments)
    request = json_format.Parse(asked.d, inference_pb2.GenerateRequest())
    with grpc.insecure_channel(asked.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            for message in stub.Stream(request, timeout=60):
                print(json.dumps(json_format.MessageToDict(message), indent=2))
        except grpc.RpcError as failed:
            error: Any = failed
            print(f"ERROR:\n  Code: {error.code().name}\n  Message: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    program, *rest = sys.argv[1:]
    if program == "grpcurl":
        sys.exit(grpcurl(rest))
    if rest[:1] == ["serve"] and not {"--help", "-h"} & set(rest):
        sys.exit(serve(rest[1:]))
    sys.exit(main(rest))
