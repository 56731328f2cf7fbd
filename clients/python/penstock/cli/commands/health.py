"""`penstock health`: says whether a server takes requests, for scripts and probes."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.cli.calling.common import add_addr, complain, connected, explain, visible
from penstock.cli.calling.connection import WrongConnection
from penstock.cli.calling.flag_values import number
from penstock.client import Client, PenstockClientError
from penstock.client.error_table import from_rpc_error

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers

SERVING, NOT_SERVING, WRONG_USAGE, NO_ANSWER = range(4)
"""Exit codes."""
_ONE_ANSWER_S = 5.0
_PAUSE_S = 0.2
_EPILOG = """\
It prints SERVING, NOT_SERVING or SERVICE_UNKNOWN. The exit code is 0 for SERVING, 1 for the others, 2 for
wrong usage, and 3 if nobody answered.

examples:
  penstock health
  penstock health --wait --timeout 300 && penstock generate "Once upon a time"
  penstock health --service liveness
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "health",
        help="say whether a server takes requests, or wait until it does",
        description="Say whether a server takes requests, or wait until it does.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="a service that the server reports health for, such as liveness; default: the whole server",
    )
    parser.add_argument("--wait", action="store_true", help="ask again and again until it is SERVING")
    parser.add_argument(
        "--timeout",
        type=number(above=0),
        metavar="S",
        help=f"give up after S seconds; default: {_ONE_ANSWER_S:g}, with --wait never",
    )
    add_addr(parser, timeout=False, retries=False)


def run(args: argparse.Namespace) -> int:
    try:
        client = connected(args)
    except WrongConnection as error:
        complain("health", str(error))
        return WRONG_USAGE
    with client:
        return _report(client, args)


def _report(client: Client, args: argparse.Namespace) -> int:
    """Ask once or, with --wait, until the server serves or the time is over. Returns the exit code."""
    limit_s = args.timeout or (None if args.wait else _ONE_ANSWER_S)
    ends = None if limit_s is None else time.monotonic() + limit_s
    while True:
        left_s = _ONE_ANSWER_S if ends is None else max(ends - time.monotonic(), 0.001)
        code, text = _ask(client, args.service, args.addr, min(left_s, _ONE_ANSWER_S))
        is_over = ends is not None and time.monotonic() + _PAUSE_S >= ends
        can_change = code == NO_ANSWER or text == "NOT_SERVING"
        if not args.wait or code == SERVING or is_over or not can_change:
            break
        time.sleep(_PAUSE_S)
    if code == NO_ANSWER:
        complain("health", text)
    else:
        print(visible(text))
    return code


def _ask(client: Client, service: str, addr: str, timeout_s: float) -> tuple[int, str]:
    """Return the exit code and what to print."""
    stub: Any = health_pb2_grpc.HealthStub(client.channel)
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        reply = stub.Check(request, timeout=timeout_s, metadata=client.metadata)
    except grpc.RpcError as error:
        found: PenstockClientError = from_rpc_error(error)
        if found.code is grpc.StatusCode.NOT_FOUND:
            return NOT_SERVING, "SERVICE_UNKNOWN"
        return NO_ANSWER, explain(found, addr)
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return (SERVING if name == "SERVING" else NOT_SERVING), name
