"""What clients see of a server with front processes is what they see of one without. `test_all_tests.py` has
many tests of the other folders run so.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.runtime.errors import ConfigError
from penstock.service.limits.admission import Kind
from penstock.service.limits.bounds import Bounds
from penstock.service.listening.listen_options import ListenOptions
from penstock.service.options import ServerOptions
from penstock.service.relay import processes
from penstock.service.rpcs import ending
from penstock.v1 import control_pb2, inference_pb2, inference_pb2_grpc
from tests.service.access.test_key_certificates import certificate, flushed
from tests.service.h2peer import Peer
from tests.service.key_rig import CONTROL, as_, key, serving_keys
from tests.service.rig import Rig, collect, failure_of, fake, generate, joined, serving, stream, until
from tests.service.tls_rig import CA, listening, secure

MIB = 2**20
STREAM = "/penstock.v1.InferenceService/Stream"


async def nothing_left(rig: Rig) -> None:
    """Say whether no call has a place, and the engine has no request."""
    await until(lambda: all(rig.server.admission.active(kind) == 0 for kind in Kind))
    await until(lambda: rig.engine.load().pages_used == 0)


async def test_calls_and_their_statuses() -> None:
    """Replies, streams of them, typed errors, deadlines, cancels, and methods that are not there."""
    async with serving(fake(hold=True), front_processes=2) as rig:
        for timeout_s in (1.0, 5.0, 15.0):  # a busy machine may need longer until the engine has it
            failure = await failure_of(rig.inference.Generate(generate("a"), timeout=timeout_s))
            assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
            if rig.engine.seen:
                break
        await nothing_left(rig)

        call = rig.inference.Stream(stream("a"))
        assert (await call.read()).HasField("started")
        call.cancel()
        await nothing_left(rig)
        assert len(rig.engine.cancelled) == 2

        rig.engine.release()
        reply = await rig.inference.Generate(generate("a", request_id="mine"))
        assert reply.request_id == "mine"
        messages = await collect(rig.inference.Stream(stream("a")))
        assert joined(messages).outputs[0].text == reply.outputs[0].text == "bcdefghijklmnopqrstuvwxyz"

        refused = await failure_of(rig.inference.Generate(generate("a", sampling={"temperature": -1})))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert list(refused.violations) == ["sampling.temperature"]
        undecodable = await failure_of(rig.raw("InferenceService/Generate", b"\xff"))
        assert undecodable.code is grpc.StatusCode.INVALID_ARGUMENT
        unknown = await failure_of(rig.raw("InferenceService/Nothing", b""))
        assert (unknown.code, unknown.reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FEATURE")
        await nothing_left(rig)


@pytest.mark.ci
async def test_large_messages() -> None:
    """Up to the limit, both ways, and beyond it."""
    async with serving(fake(max_model_len=MIB), front_processes=1, max_receive_bytes=MIB) as rig:
        text = "a" * (MIB * 3 // 4)
        tokens = await rig.control.Tokenize(control_pb2.TokenizeRequest(text=text))
        assert len(tokens.token_ids) == len(text)
        refused = await failure_of(rig.control.Tokenize(control_pb2.TokenizeRequest(text=2 * text)))
        assert refused.reason == "MESSAGE_TOO_LARGE"
        prompt = {"ids": [97] * 8000}
        request = stream(prompt_token_ids=prompt, output={"prompt_logprobs": 20}, stopping={"max_tokens": 2})
        started = (await collect(rig.inference.Stream(request)))[0]
        assert started.ByteSize() > MIB


@pytest.mark.ci
async def test_a_reader_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told so, others are served, and nothing of its call is left."""
    monkeypatch.setattr(ending, "LAST_WORDS_S", 0.2)
    async with (
        serving(fake(max_model_len=100_000), stall_limit_s=0.5, front_processes=1) as rig,
        Peer(rig.server.address) as peer,
    ):
        endless = stream("a", stopping={"ignore_eos": True}).SerializeToString()
        calls = [await peer.call(STREAM, endless) for _ in range(5)]
        await peer.until(lambda: all(peer.headers(call) for call in calls))
        await collect(rig.inference.Stream(stream("a")))
        await peer.until(lambda: all(peer.ended(call) for call in calls))
        assert {peer.body(call) for call in calls} == {b""}
        await until(lambda: rig.server.sends.num_stalled == len(calls))
        await nothing_left(rig)


@pytest.mark.ci
async def test_a_slow_reader_holds_back_its_own_stream_and_no_other() -> None:
    """One message of it is under way. The rest waits in the engine's process, merged and counted."""
    async with (
        serving(fake(hold=True, max_model_len=3000), front_processes=1) as rig,
        Peer(rig.server.address) as peer,
    ):
        request = stream("a", stopping={"ignore_eos": True, "max_tokens": 2000})
        slow = await peer.call(STREAM, request.SerializeToString())
        await peer.until(lambda: peer.headers(slow))
        rig.engine.step(1)
        await until(lambda: rig.serving.budget.used > 0)
        rig.engine.release()
        await collect(rig.inference.Stream(stream("a")))
        await until(lambda: rig.engine.load().num_running == 0)
        await peer.open_window(0, MIB)
        await peer.open_window(slow, MIB)
        assert await peer.status(slow) == 0
        kinds = [message.WhichOneof("event") for message in messages_of(peer.body(slow))]
        # A front process under load may take the first token before all others are there.
        deltas = kinds.count("delta")
        assert kinds == ["started", *["delta"] * deltas, "finished", "summary"]
        assert deltas <= 2


def messages_of(body: bytes) -> list[inference_pb2.StreamResponse]:
    """Return the messages of a stream, from its bytes with gRPC's prefixes."""
    found = []
    while body:
        end = 5 + int.from_bytes(body[1:5])
        found.append(inference_pb2.StreamResponse.FromString(body[5:end]))
        body = body[end:]
    return found


@pytest.mark.ci
async def test_tls_keys_and_certificates(tmp_path: Path) -> None:
    """A front process shows the server's certificate, and the engine's process learns the client's."""
    entries = [certificate("boss", "alice", roles=CONTROL), key("user")]
    mutual: Any = {"listen": listening(client_ca=CA), "front_processes": 1}
    async with serving_keys(tmp_path / "keys.json", *entries, **mutual) as rig:
        async with secure(rig.server.address, client="client") as channel:
            assert await flushed(channel) == "OK"
            assert await flushed(channel, **as_("user")) == "FORBIDDEN"
            assert await flushed(channel, **as_("wrong")) == "UNAUTHENTICATED"
        async with secure(rig.server.address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            assert (await failure_of(stub.Generate(generate("a")))).code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.ci
async def test_other_addresses_are_served_by_the_engine_s_process(tmp_path: Path) -> None:
    """The Unix socket and the control port; what each of them refuses stays the same."""
    listen = ListenOptions(unix_socket=tmp_path / "s", control_port=0)
    async with serving(listen=listen, front_processes=1) as rig:
        port, unix = rig.server.addresses.main
        assert await flushed(rig.channel) == "SERVED_ELSEWHERE"
        for address in (port, unix):
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
                assert (await stub.Generate(generate("y"))).outputs[0].text == "z"
        assert rig.server.addresses.control_address is not None
        async with grpc.aio.insecure_channel(rig.server.addresses.control_address) as channel:
            assert await flushed(channel) == "OK"


@pytest.mark.ci
async def test_places_are_counted_over_all_front_processes() -> None:
    """Those of all callers, and those of one connection, which is known by its peer."""
    bounds = Bounds(max_rpcs=3, max_rpcs_per_connection=2)
    async with serving(fake(hold=True), bounds=bounds, front_processes=2) as rig:
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(rig.server.address, options=own) as other:
            first: Any = inference_pb2_grpc.InferenceServiceStub(rig.channel)
            second: Any = inference_pb2_grpc.InferenceServiceStub(other)
            running = [asyncio.ensure_future(first.Generate(generate("y"))) for _ in range(2)]
            await until(lambda: len(rig.engine.seen) == 2)
            refused = await failure_of(first.Generate(generate("y")))
            assert refused.info.metadata["limit"] == "max_rpcs_per_connection"
            running.append(asyncio.ensure_future(second.Generate(generate("y"))))
            await until(lambda: len(rig.engine.seen) == 3)
            assert (await failure_of(second.Generate(generate("y")))).info.metadata["limit"] == "max_rpcs"
            rig.engine.release()
            assert [reply.outputs[0].text for reply in await asyncio.gather(*running)] == ["z"] * 3


@pytest.mark.ci
async def test_a_front_process_carries_so_many_calls_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here two. Such a number waits only where the engine's process does not keep up."""
    monkeypatch.setattr(processes, "backlog_of", lambda bounds: 1)
    async with serving(fake(hold=True), front_processes=1) as rig:
        running = [asyncio.ensure_future(rig.inference.Generate(generate("y"))) for _ in range(2)]
        await until(lambda: len(rig.engine.seen) == 2)
        for _ in range(5):
            failure = await failure_of(rig.inference.Generate(generate("y")))
            assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert failure.message == "too many calls are under way"
        rig.engine.release()
        assert [reply.outputs[0].text for reply in await asyncio.gather(*running)] == ["z"] * 2
        await nothing_left(rig)
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"
        assert len(rig.engine.seen) == 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"front_processes": -1}, "front_processes: must be from 0 to 64, not -1"),
        ({"front_processes": 65}, "front_processes: must be from 0 to 64, not 65"),
        (
            {"front_processes": 1, "port": None, "listen": ListenOptions(unix_socket=Path("s"))},
            "front_processes: needs --port, because front processes serve no Unix socket",
        ),
        (
            {"front_processes": 3, "bounds": Bounds(max_connections=2)},
            "max_connections: must be at least front_processes, which is 3, not 2",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServerOptions(**options)
    assert str(error.value) == told
