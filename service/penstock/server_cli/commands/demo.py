"""`penstock demo`: serves the built-in demo model, shows one answer, and prints commands to try.

The server is a child process that runs what an operator runs: `penstock serve demo`. It has its own process
group, so that Ctrl-C reaches it once, through this process, and not a second time from the terminal: a server
takes a second signal as "stop without finishing the running requests".
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.calling.common import complain, explain, write
from penstock.client import Client, NotReady, PenstockClientError
from penstock.server_cli.processes.demo_child import Child, child

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers

PROMPT = "Once upon a time"
SAMPLE_TOKENS = 120
READY_LIMIT_S = 600.0
"""Seconds until a server that runs and does not become ready is given up. A slow machine takes minutes to
build the kernels.
"""
OPENAI_PORT = 8000
DIRECT = (("grpc.enable_http_proxy", 0),)
"""No proxy, because the server is on this machine, whatever --host is."""

PASTE = """
Try it from another terminal:

  grpcurl -plaintext -d '{{"prompt": "{prompt}", "stopping": {{"max_tokens": 60}}}}' \\
    {addr} penstock.v1.InferenceService/Stream

  {program} generate "{prompt}"{flag}
  {program} chat{flag}
  {program} info{flag}

with any program that speaks OpenAI's API:

  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "demo", "messages": [{{"role": "user", "content": "what is 3 + 4?"}}]}}'

or from Python ({python}):

  from penstock.client import Client

  with Client("{addr}") as client:
      for event in client.stream("{prompt}", max_tokens=60):
          print(event.delta, end="", flush=True)

Serving on {addr}, and in a browser on {url}/. Ctrl-C stops it.
"""


class GaveUp(Exception):
    """The server runs, but does not become ready."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="start the built-in demo model, show one answer, and stay up",
        description="Start a server for the built-in demo model, show one answer, and stay up until Ctrl-C.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=50051, help="default: %(default)s")
    parser.add_argument(
        "--openai-port",
        type=int,
        metavar="N",
        help="port of OpenAI's HTTP API and of the web page; default: 8000, or a free one if that is taken",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow a --host that other machines can reach: everybody who reaches it may use the model",
    )


def server_command(host: str, port: int, openai_port: int, *, insecure: bool) -> list[str]:
    """Make the command line of the child."""
    address = ["--host", host, "--port", str(port), "--openai-port", str(openai_port)]
    command = [sys.executable, "-P", "-m", "penstock.cli", "serve", "demo", *address]
    return [*command, "--insecure"] if insecure else command


def _tried(host: str, port: int) -> int:
    """Bind a socket there for a moment, as a server would, and return its port. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        # as gRPC does: a port in TIME_WAIT is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        return int(probe.getsockname()[1])


def free_openai_port(host: str, port: int) -> int:
    """Return the usual port of OpenAI's API, or any free one if that is taken, also by `port`. Raises OSError
    if there is none.
    """
    with contextlib.suppress(OSError):
        if port != OPENAI_PORT:
            return _tried(host, OPENAI_PORT)
    return _tried(host, 0)


def problem_of(host: str, port: int, flag: str = "--port") -> str | None:
    """Say why a server cannot listen there; None if it can. It is checked here because the server itself
    notices only after it has loaded the model. `flag` is what has set the port.
    """
    if not 1 <= port <= 65535:  # with 0 this process would not know the port, and could not ask the server
        return f"{flag} must be from 1 to 65535, not {port}"
    try:
        _tried(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return f"cannot listen on {host}, port {port}: {error.strerror}"
        another = port + 1 if port < 65535 else 50051
        return (
            f"port {port} on {host} is taken, perhaps by a running demo; "
            f"choose another: penstock demo {flag} {another}"
        )
    return None


def addr_of(host: str, port: int) -> str:
    """Return the address under which a client on this machine finds a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run(args: argparse.Namespace) -> int:
    """Run the demo. Returns the server's exit code (128 + n if signal n ended it), or 1 if the demo itself
    failed.
    """
    problem = problem_of(args.host, args.port)
    if problem is None and args.openai_port is not None:
        problem = problem_of(args.host, args.openai_port, "--openai-port")
    if problem is not None:
        complain(args.command, problem)
        return 1
    addr = addr_of(args.host, args.port)
    openai_port = args.openai_port or free_openai_port(args.host, args.port)
    url = f"http://{addr_of(args.host, openai_port)}"
    failed = False
    with child(server_command(args.host, args.port, openai_port, insecure=args.insecure)) as server:
        try:
            with Client(addr, options=DIRECT) as client:
                if _wait_ready(server, client):
                    _show(client, addr, url)
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
    """Wait until health is SERVING. Returns false if the server ended first; raises GaveUp after
    READY_LIMIT_S.
    """
    give_up_at = time.monotonic() + READY_LIMIT_S
    while server.runs():
        try:
            client.wait_ready(timeout=0.5)
        except NotReady as error:
            if time.monotonic() > give_up_at:
                raise GaveUp(
                    f"the server was not ready {READY_LIMIT_S:g} s after its start, so it is stopped: {error}"
                ) from error
            continue
        return True
    return False


def _show(client: Client, addr: str, url: str) -> None:
    """Stream one answer, and print how to get more."""
    with client.stream(PROMPT, max_tokens=SAMPLE_TOKENS) as stream:
        # the event `started`: what the server logs about the request appears before the answer, not within it
        next(stream)
        write(f"\n{PROMPT}")
        for event in stream:
            write(event.delta)
    flag = "" if addr == "127.0.0.1:50051" else f" --addr {addr}"
    program, python = programs()
    write("\n" + PASTE.format(prompt=PROMPT, addr=addr, url=url, flag=flag, program=program, python=python))


def programs() -> tuple[str, str]:
    """Tell how another terminal in this folder calls `penstock` and Python: with a path if they are not on
    PATH.
    """
    if shutil.which("penstock") is not None:
        return "penstock", "python"
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    script = python.with_name("penstock")
    return str(script) if script.exists() else f"{python} -m penstock.cli", str(python)
