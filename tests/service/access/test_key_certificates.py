"""Client certificates that stand for a key's id, and keys if control has a port of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from penstock.service.listening.listen_options import ListenOptions
from penstock.service.options import ServerOptions
from penstock.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.service.key_rig import CONTROL, as_, key, serving_keys, write
from tests.service.rig import Rig, fake, generate, taken_apart, until
from tests.service.tls_rig import CA, listening, secure

MUTUAL = {"listen": listening(client_ca=CA)}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.json"


def certificate(name: str, *names: str, **fields: Any):
    """Make an entry without a key."""
    return key(name, certificates=names, sha256="", **fields)


async def flushed(channel: grpc.aio.Channel, **more: Any) -> str:
    """Return the answer of an RPC that needs the role control: "OK", or the reason."""
    stub: Any = control_pb2_grpc.ControlServiceStub(channel)
    try:
        await asyncio.wait_for(stub.FlushCache(control_pb2.FlushCacheRequest(), **more), 20)
    except grpc.aio.AioRpcError as error:
        return taken_apart(error).reason
    return "OK"


@pytest.mark.parametrize("name", ["alice", "alice.example", "spiffe://example/alice"])
async def test_a_certificate_stands_for_an_id(file, name):
    """By its common name and by each alternative name; these are in the certificate "client"."""
    entries = [certificate("boss", name, roles=CONTROL), key("user")]
    async with (
        serving_keys(file, *entries, **MUTUAL) as rig,
        secure(rig.server.address, client="client") as channel,
    ):
        assert await flushed(channel) == "OK"


async def test_a_certificate_that_stands_for_nobody(file):
    """TLS has verified it, but that alone allows nothing."""
    async with (
        serving_keys(file, certificate("bob", "bob.example"), key("user", CONTROL), **MUTUAL) as rig,
        secure(rig.server.address, client="client") as channel,
    ):
        assert await flushed(channel) == "UNAUTHENTICATED"
        assert await flushed(channel, **as_("user")) == "OK", "a key does, with any certificate"


async def test_a_key_counts_more_than_the_certificate(file):
    """Also a wrong key: otherwise a caller would not notice that its key was revoked."""
    entries = [certificate("boss", "alice", roles=CONTROL), key("user"), key("gone", CONTROL, revoked=True)]
    async with (
        serving_keys(file, *entries, **MUTUAL) as rig,
        secure(rig.server.address, client="client") as channel,
    ):
        assert await flushed(channel) == "OK"
        assert await flushed(channel, **as_("user")) == "FORBIDDEN"
        assert await flushed(channel, **as_("gone")) == "UNAUTHENTICATED"
        assert await flushed(channel, **as_("wrong")) == "UNAUTHENTICATED"


async def test_a_revoked_id_has_no_certificate(file):
    entries = [certificate("boss", "alice", roles=CONTROL, revoked=True)]
    async with (
        serving_keys(file, *entries, **MUTUAL) as rig,
        secure(rig.server.address, client="client") as channel,
    ):
        assert await flushed(channel) == "UNAUTHENTICATED"


async def test_who_has_key_and_certificate_is_one_caller(file):
    """What it began with one it can end with the other."""
    engine = fake(hold=True)
    entries = [key("alice", certificates=("alice",))]
    async with (
        serving_keys(file, *entries, engine=engine, **MUTUAL) as rig,
        secure(rig.server.address, client="client") as channel,
    ):
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = asyncio.ensure_future(stub.Generate(generate("a", request_id="r"), **as_("alice")))
        await until(lambda: len(engine.seen) == 1)
        target = inference_pb2.AbortRequest(request_ids=inference_pb2.RequestIds(ids=["r"]))
        (result,) = (await asyncio.wait_for(stub.Abort(target), 20)).results
        assert result.outcome == inference_pb2.ABORT_OUTCOME_ABORTED
        await asyncio.wait_for(call, 20)


async def test_without_mutual_tls_nobody_has_a_certificate(file):
    """Metadata that claim one do not help."""
    async with serving_keys(file, certificate("boss", "alice", roles=CONTROL), key("user")) as rig:
        assert await flushed(rig.channel) == "UNAUTHENTICATED"
        assert await flushed(rig.channel, metadata=[("x509_common_name", "alice")]) == "UNAUTHENTICATED"


async def test_at_the_main_address_control_keys_reach_only_their_own(file):
    """If control has a port of its own, only that address is for control, whatever the key says."""
    engine = fake(hold=True)
    everything = inference_pb2.AbortRequest(all=inference_pb2.AllRequests())
    async with serving_keys(
        file, key("alice"), key("boss", CONTROL), engine=engine, listen=ListenOptions(control_port=0)
    ) as main:
        address = main.server.addresses.control_address
        assert address is not None
        async with grpc.aio.insecure_channel(address) as channel:
            control = Rig(engine, main.server, channel)
            call = asyncio.ensure_future(
                main.inference.Generate(generate("a", request_id="r"), **as_("alice"))
            )
            await until(lambda: len(engine.seen) == 1)
            assert not (await main.inference.Abort(everything, **as_("boss"))).results
            assert await flushed(main.channel, **as_("boss")) == "SERVED_ELSEWHERE"
            assert await flushed(channel, **as_("boss")) == "OK"
            assert await flushed(channel, **as_("alice")) == "FORBIDDEN"
            assert await flushed(channel) == "UNAUTHENTICATED"
            reply = await control.inference.Abort(everything, **as_("boss"))
            assert [r.request_id for r in reply.results] == ["r"]
            await asyncio.wait_for(call, 20)


def test_an_open_address_is_protected_by_keys_and_tls(file):
    """Keys tell callers apart, but without TLS anybody on the network could read them."""
    options = ServerOptions(host="0.0.0.0", keys=write(file, [key("alice")]), listen=listening())
    assert options.lacking == []


async def test_the_log_names_the_caller_of_a_refusal(file, caplog):
    """It logs the key's id, never the key."""
    caplog.set_level("INFO")
    async with serving_keys(file, key("alice")) as rig:
        assert await flushed(rig.channel, **as_("alice")) == "FORBIDDEN"
        # The line is written once the answer has left, so the client may see the answer first.
        await until(
            lambda: any("refused" in message and "FORBIDDEN" in message for message in caplog.messages)
        )
        (line,) = [message for message in caplog.messages if "refused" in message and "FORBIDDEN" in message]
        assert "key 'alice'" in line
        assert "psk_" not in caplog.text
