"""Keys on a server with several addresses: what a key, or a certificate in its place, may do at
each address.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.runtime.errors import ConfigError
from penstock.service.access.key_file import KeyEntry
from penstock.service.listening.listen_options import ListenOptions
from penstock.service.options import ServerOptions
from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.key_rig import CONTROL, INFER, as_, key, serving_keys
from tests.service.rig import Rig, failure_of, fake, generate, until
from tests.service.tls_rig import CA, listening, secure

ALL = inference_pb2.AbortRequest(all=inference_pb2.AllRequests())
FLUSH = control_pb2.FlushCacheRequest()


async def test_nobody_controls_at_the_main_address(tmp_path: Path) -> None:
    """There the control role has no effect: its key ends its own requests, like every other key."""
    entries = [key("boss", INFER | CONTROL), key("alice")]
    listen = ListenOptions(control_port=0)
    async with serving_keys(tmp_path / "keys", *entries, engine=fake(hold=True), listen=listen) as main:
        address = main.server.addresses.control_address
        assert address is not None
        async with grpc.aio.insecure_channel(address) as channel:
            control = Rig(main.engine, main.server, channel)
            runs = {
                name: asyncio.ensure_future(main.inference.Generate(generate("a"), **as_(name)))
                for name in ("boss", "alice")
            }
            await until(lambda: len(main.engine.seen) == 2)
            assert (
                await failure_of(main.control.FlushCache(FLUSH, **as_("boss")))
            ).reason == "SERVED_ELSEWHERE"
            await main.inference.Abort(ALL, timeout=20, **as_("boss"))
            assert (await runs["boss"]).outputs[0].finish.reason == types_pb2.FINISH_REASON_ABORTED
            assert not runs["alice"].done()

            assert (await failure_of(control.control.FlushCache(FLUSH, **as_("alice")))).reason == "FORBIDDEN"
            assert (await failure_of(control.control.FlushCache(FLUSH))).reason == "UNAUTHENTICATED"
            await control.control.FlushCache(FLUSH, timeout=20, **as_("boss"))
            await control.inference.Abort(ALL, timeout=20, **as_("boss"))
            assert (await runs["alice"]).outputs[0].finish.reason == types_pb2.FINISH_REASON_ABORTED


async def test_a_certificate_stands_for_a_key(tmp_path: Path) -> None:
    """It has the roles of that key, and none if no key has one of its names."""
    listed = KeyEntry("by-name", roles=INFER, certificates=("spiffe://example/alice",))
    async with serving_keys(
        tmp_path / "keys", listed, key("boss", CONTROL), listen=listening(client_ca=CA)
    ) as rig:
        async with secure(rig.server.address, client="client") as channel:
            alice = Rig(rig.engine, rig.server, channel)
            assert (await alice.inference.Generate(generate("y"), timeout=20)).outputs[0].text == "z"
            failure = await failure_of(alice.control.FlushCache(FLUSH))
            assert failure.reason == "FORBIDDEN"
            assert "'by-name'" in failure.message
            await alice.control.FlushCache(FLUSH, timeout=20, **as_("boss"))
        async with secure(rig.server.address, client="server") as channel:
            nobody = Rig(rig.engine, rig.server, channel)
            assert (await failure_of(nobody.inference.Generate(generate("y")))).reason == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, "no TLS (--tls-cert and --tls-key) and no way to tell callers apart"),
        ({"keys": Path("keys")}, "the server has no TLS (--tls-cert and --tls-key);"),
        ({"listen": listening()}, "the server has no way to tell callers apart (--keys or --client-ca);"),
    ],
)
def test_what_is_missing_is_named(options: dict[str, Any], missing: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(missing)):
        ServerOptions(host="0.0.0.0", **options)


def test_tls_and_keys_are_enough() -> None:
    assert not ServerOptions(host="0.0.0.0", keys=Path("keys"), listen=listening()).lacking
