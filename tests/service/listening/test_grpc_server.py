"""Calls of methods that the server does not have: each is refused with details, and none ends the server."""

from __future__ import annotations

import asyncio
import gc
import time
from importlib import metadata
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no hints
from grpc._cython import cygrpc
from grpc.aio import _server as grpc_aio

from penstock.service.listening import grpc_server
from penstock.service.listening.listen_options import ListenOptions
from penstock.service.server import READINESS
from tests.service.cli.test_serve import fake_process
from tests.service.h2peer import Peer
from tests.service.rig import WAIT_S, Rig, failure_of, generate, serving, until

CANCELLED, UNIMPLEMENTED = 1, 12
NOT_SERVING = 2
PATHS = [
    b"/\xff",
    b"\xff",
    b"/penstock.v1.InferenceService/Generate\xff",
    b"/" + b"\xc3\x28" * 1000,
    b"/some.other.Service/Method",
    b"/",
    b"",
]


async def check_answers(rig: Rig) -> None:
    assert (await rig.inference.Generate(generate("y"), timeout=WAIT_S)).outputs[0].text == "z"


def reasons(peer: Peer, stream: int) -> dict[str, str]:
    """Return the reason and the request's id in the status's details."""
    status = status_pb2.Status.FromString(peer.headers(stream)["grpc-status-details-bin"].removeprefix(b"\0"))
    found: dict[str, str] = {}
    for packed in status.details:
        info, request = error_details_pb2.ErrorInfo(), error_details_pb2.RequestInfo()
        if packed.Unpack(info):
            found["reason"] = info.reason
        elif packed.Unpack(request):
            found["request_id"] = request.request_id
    return found


@pytest.mark.parametrize("path", PATHS)
async def test_any_path_is_refused_and_the_server_goes_on(path: bytes) -> None:
    async with serving() as rig:
        for _ in range(3):
            async with Peer(rig.server.address) as peer:
                stream = await peer.call(path, b"")
                await peer.until(lambda: peer.ended(stream))  # noqa: B023 -- awaited here
                if path.startswith(b"/"):  # else gRPC's core may refuse it before we see it
                    assert await peer.status(stream) == UNIMPLEMENTED
                    found = reasons(peer, stream)
                    assert found["reason"] == "UNSUPPORTED_FEATURE"
                    assert found["request_id"]
            await check_answers(rig)


async def test_a_path_that_is_no_text_at_the_control_port() -> None:
    async with serving(listen=ListenOptions(control_port=0)) as rig:
        address = rig.server.addresses.control_address
        assert address is not None
        for _ in range(2):
            async with Peer(address) as peer:
                stream = await peer.call(b"/\xff", b"")
                assert await peer.status(stream) == UNIMPLEMENTED
        await check_answers(rig)


async def test_nothing_stays_of_refused_calls() -> None:
    """Neither of calls that take their status nor of calls that are cancelled meanwhile."""
    async with serving() as rig:
        async with Peer(rig.server.address) as peer:
            streams = [await peer.call(b"/\xff", None, end=False) for _ in range(50)]
            for stream in streams[:25]:
                await peer.reset(stream)
            await peer.until(lambda: all(peer.ended(stream) for stream in streams[25:]))
            await peer.call(b"/\xff", b"")  # one more call, whose peer vanishes
        await until(lambda: not _refusing(rig))
        await check_answers(rig)


async def test_refusals_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MAX_REFUSING", 1)
    async with serving() as rig, Peer(rig.server.address) as peer:
        refusing = vars(rig.server.addresses.servers[0])["_server"]._refusing
        stuck = asyncio.create_task(asyncio.Event().wait())
        refusing.add(stuck)
        stream = await peer.call("/some.other.Service/Method", None, end=False)
        await peer.until(lambda: peer.ended(stream))
        assert "grpc-status-details-bin" not in peer.headers(stream)
        assert int(peer.headers(stream).get("grpc-status", CANCELLED)) == CANCELLED
        refusing.discard(stuck)
        stuck.cancel()
        stream = await peer.call("/some.other.Service/Method", b"")
        assert await peer.status(stream) == UNIMPLEMENTED


async def test_unknown_calls_do_not_keep_the_server_from_ending() -> None:
    async with serving() as rig, Peer(rig.server.address) as peer:
        for _ in range(20):
            await peer.call(b"/\xff", None, end=False)
        await asyncio.wait_for(rig.server.stop(), WAIT_S)


async def test_an_end_that_nobody_asked_for_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as rig:
        assert await rig.health_of() != NOT_SERVING
        await rig.server.addresses.servers[0].stop(None)
        await asyncio.wait_for(rig.server.wait_for_failure(), WAIT_S)
        assert [rig.server._health._statuses[name] for name in READINESS] == [NOT_SERVING] * len(READINESS)
        assert "gRPC stopped listening" in caplog.text
        assert await asyncio.wait_for(rig.server.stop(), WAIT_S)


async def test_an_end_that_was_asked_for_is_none(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as rig:
        await rig.server.stop()
        assert not rig.server._failed.is_set()
    assert "gRPC stopped listening" not in caplog.text


async def test_two_stops_whose_ends_meet() -> None:
    """gRPC itself would end the process: one frees the server, and the other cancels its calls. The event
    loop is held up so that a grace passes just before the loop hears that all calls have ended.
    """
    called = asyncio.Event()

    async def hold(request: bytes, context: object) -> None:
        called.set()
        await asyncio.Event().wait()

    async def refuse(context: object) -> None: ...

    server: Any = grpc_server.refusing_server(refuse, interceptors=(), options=())
    server.add_registered_method_handlers("a.B", {"C": grpc.unary_unary_rpc_method_handler(hold)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    loop, stops = asyncio.get_running_loop(), list[asyncio.Task[None]]()

    def hold_up() -> None:
        time.sleep(0.05)
        stops.append(asyncio.create_task(server.stop(None)))
        loop.call_soon(time.sleep, 0.02)

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        held: Any = channel.unary_unary("/a.B/C")
        call = asyncio.ensure_future(failure_of(held(b"")))
        await asyncio.wait_for(called.wait(), WAIT_S)
        loop.call_later(0.08, hold_up)
        await server.stop(0.1)
        await stops[0]
        assert (await call).code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", ["deaf", pytest.param("deaf-early", marks=pytest.mark.sweep)])
def test_the_process_ends_with_it(name: str) -> None:
    """So that an orchestrator can start it again."""
    with fake_process("--port", "0", "--served-model-name", name) as served:
        served.wait_for("ERROR.*gRPC stopped listening")
        assert served.wait() == 1


def test_what_is_used_of_grpcio_beyond_its_public_names() -> None:
    """Another version must be checked against grpc_server.py; then pyproject.toml's bound may be raised."""
    version = metadata.version("grpcio")
    used = {
        cygrpc: ("AioServer", "_ServicerContext", "get_working_loop"),
        cygrpc.AioServer: (
            "_make_request_call_future",
            "_request_call",
            "add_registered_method_handlers",
            "shutdown",
        ),
        cygrpc._ServicerContext: ("abort", "peer", "invocation_metadata"),
        grpc_aio: ("Server", "_augment_channel_arguments"),
    }
    gone = [name for where, names in used.items() for name in names if not hasattr(where, name)]
    assert not gone, f"grpcio {version} no longer has what service/listening/grpc_server.py uses"
    assert version.startswith("1.85."), f"grpc_server.py was never looked at with grpcio {version}"
    assert issubclass(grpc_server.RefusingServer, grpc_aio.Server)


def _refusing(rig: Rig) -> int:
    gc.collect()
    return sum(len(vars(server)["_server"]._refusing) for server in rig.server.addresses.servers)
