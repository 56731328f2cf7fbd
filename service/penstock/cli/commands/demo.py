"""`penstock demo`: the built-in demo model, served, with one answer shown and lines to paste.

The server is a child process, so that what runs here is what an operator runs: `penstock serve demo`. It has
its own process group: Ctrl-C reaches it once, from us, and not a second time from the terminal, which a
server reads as "stop without finishing the running requests".
"""

from __future__ import annotations

import argparse
import errno
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.calling.common import complain, explain, write
from penstock.cli.processes.demo_child import Child, child
from penstock.client import Client, NotReady, PenstockClientError

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers

PROMPT = "Once upon a time"
SAMPLE_TOKENS = 120
READY_LIMIT_S = 600.0
"""For a server that runs and never gets ready. A slow machine takes minutes to build the kernels."""
DIRECT = (("grpc.enable_http_proxy", 0),)
"""The server is on this machine, whatever --host is: no proxy could reach it better than we."""

PASTE = """
Try it from another terminal:

  grpcurl -plaintext -d '{{"prompt": "{prompt}", "stopping": {{"max_tokens": 60}}}}' \\
    {addr} penstock.v1.InferenceService/Stream

  {program} generate "{prompt}"{flag}
  {program} chat{flag}
  {program} info{flag}

or from Python ({python}):

  from penstock.client import Client

  with Client("{addr}") as client:
      for event in client.stream("{prompt}", max_tokens=60):
          print(event.delta, end="", flush=True)

Serving on {addr}. Ctrl-C stops it.
"""


class GaveUp(Exception):
    """The server runs, but will not serve."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="start the built-in demo model, show one answer, and stay up",
        description="Start a server for the built-in demo model, show one answer, and stay up until Ctrl-C.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=50051, help="default: %(default)s")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow a --host that other machines can reach; whoever does may use the model",
    )


def server_command(host: str, port: int, *, insecure: bool) -> list[str]:
    """What the child runs."""
    address = ["--host", host, "--port", str(port)]
    command = [sys.executable, "-P", "-m", "penstock.cli", "serve", "demo", *address]
    return [*command, "--insecure"] if insecure else command


def problem_of(host: str, port: int) -> str | None:
    """Why a server cannot listen there; asked before it loads the model, as it finds out only after."""
    if not 1 <= port <= 65535:  # 0 would leave us, who ask the server for an answer, without its port
        return f"--port must be from 1 to 65535, not {port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: TIME_WAIT is free
            probe.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return f"cannot listen on {host}, port {port}: {error.strerror}"
        another = port + 1 if port < 65535 else 50051
        return (
            f"port {port} on {host} is taken, perhaps by a running demo; "
            f"choose another: penstock demo --port {another}"
        )
    return None


def addr_of(host: str, port: int) -> str:
    """Where a client of this machine finds a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run(args: argparse.Namespace) -> int:
    """Returns the server's exit code (128 + n when signal n ended it), and 1 where the demo itself failed."""
    problem = problem_of(args.host, args.port)
    if problem is not None:
        complain(args.command, problem)
        return 1
    addr = addr_of(args.host, args.port)
    failed = False
    with child(server_command(args.host, args.port, insecure=args.insecure)) as server:
        try:
            with Client(addr, options=DIRECT) as client:
                if _wait_ready(server, client):
                    _show(client, addr)
        except (GaveUp, PenstockClientError) as error:
            if server.runs() and not server.stopped:
                failed = True
                complain(args.command, str(error) if isinstance(error, GaveUp) else explain(error, addr))
                server.stop()
        code = server.wait()
    if code != 0 and not server.stopped and not failed:
        complain(args.command, f"the server ended with exit code {code}; its output above says why")
    return (code if code >= 0 else 128 - code) or int(failed)


def _wait_ready(server: Child, client: Client) -> bool:
    """Until health is SERVING; False when the server ended first. GaveUp after READY_LIMIT_S."""
    give_up_at = time.monotonic() + READY_LIMIT_S
    while server.runs():
        try:
            client.wait_ready(timeout=0.5)
        except NotReady as error:
            if time.monotonic() > give_up_at:
                raise GaveUp(
                    f"the server runs, but is not ready {READY_LIMIT_S:g} s after its start, "
                    f"so it is ended: {error}"
                ) from error
            continue
        return True
    return False


def _show(client: Client, addr: str) -> None:
    """One answer, streamed, and how to get more."""
    with client.stream(PROMPT, max_tokens=SAMPLE_TOKENS) as stream:
        next(stream)  # started: what the server logs about the request stands before the answer, not in it
        write(f"\n{PROMPT}")
        for event in stream:
            write(event.delta)
    flag = "" if addr == "127.0.0.1:50051" else f" --addr {addr}"
    program, python = programs()
    write("\n" + PASTE.format(prompt=PROMPT, addr=addr, flag=flag, program=program, python=python))


def programs() -> tuple[str, str]:
    """How another terminal in this folder calls `penstock` and Python: by path where no PATH has them."""
    if shutil.which("penstock") is not None:
        return "penstock", "python"
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    script = python.with_name("penstock")
    return str(script) if script.exists() else f"{python} -m penstock.cli", str(python)
