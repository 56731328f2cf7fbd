"""Who may call which RPC on a real server: keys, roles, expiry, models."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock.runtime.errors import ConfigError
from penstock.v1 import adapters_pb2, control_pb2, inference_pb2, telemetry_pb2
from tests.service.key_rig import CONTROL, INFER, as_, key, serving_keys, write
from tests.service.rig import collect, failure_of, fake, generate, serving, stream, taken_apart, until

CALLS: dict[str, Any] = {
    "InferenceService/Generate": generate("a"),
    "InferenceService/Stream": stream("a"),
    "InferenceService/Embed": inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="a")]),
    "InferenceService/Score": inference_pb2.ScoreRequest(
        prompt="a", continuations=[inference_pb2.Continuation(text="b")]
    ),
    "InferenceService/Rerank": inference_pb2.RerankRequest(query="a", documents=["b"]),
    "InferenceService/Classify": inference_pb2.ClassifyRequest(
        inputs=[inference_pb2.ClassifyInput(text="a")]
    ),
    "InferenceService/Abort": inference_pb2.AbortRequest(all=inference_pb2.AllRequests()),
    "InferenceService/UpdateWeights": None,
    "ControlService/GetModelInfo": control_pb2.GetModelInfoRequest(),
    "ControlService/GetServerInfo": control_pb2.GetServerInfoRequest(),
    "ControlService/GetLoad": control_pb2.GetLoadRequest(),
    "ControlService/Tokenize": control_pb2.TokenizeRequest(text="a"),
    "ControlService/Detokenize": control_pb2.DetokenizeRequest(token_ids=[97]),
    "ControlService/GetVocabulary": control_pb2.GetVocabularyRequest(),
    "ControlService/Pause": control_pb2.PauseRequest(),
    "ControlService/Resume": control_pb2.ResumeRequest(),
    "ControlService/CommitWeights": control_pb2.CommitWeightsRequest(),
    "ControlService/DiscardWeights": control_pb2.DiscardWeightsRequest(),
    "ControlService/LoadAdapter": adapters_pb2.LoadAdapterRequest(name="a"),
    "ControlService/PushAdapter": None,
    "ControlService/UnloadAdapter": adapters_pb2.UnloadAdapterRequest(name="a"),
    "ControlService/PinAdapter": adapters_pb2.PinAdapterRequest(name="a"),
    "ControlService/ListAdapters": adapters_pb2.ListAdaptersRequest(),
    "ControlService/FlushCache": control_pb2.FlushCacheRequest(),
    "ControlService/WatchLoad": telemetry_pb2.WatchLoadRequest(),
    "ControlService/SetTracing": telemetry_pb2.SetTracingRequest(),
    "ControlService/Profile": telemetry_pb2.ProfileRequest(),
}
FOR_ALL = {
    *("Generate", "Stream", "Abort", "GetModelInfo", "GetServerInfo", "GetLoad", "Tokenize", "Detokenize"),
    *("WatchLoad", "GetVocabulary", "Embed", "Score", "Rerank", "Classify", "ListAdapters"),
}


async def call(rig, method: str, **more: Any) -> str:
    """ "OK", or the reason of the refusal."""
    service, name = method.split("/")
    stub = getattr(rig.inference if service == "InferenceService" else rig.control, name)
    request = CALLS[method]
    try:
        async with asyncio.timeout(20):
            if name == "Stream":
                await collect(stub(request, **more))
            elif name in ("WatchLoad", "Profile"):
                await stub(request, **more).read()
            else:
                await stub(iter(()) if request is None else request, **more)
    except grpc.aio.AioRpcError as error:
        failure = taken_apart(error)
        return f"{failure.code.name} {failure.reason}"
    return "OK"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.json"


@pytest.mark.parametrize("method", CALLS)
async def test_without_a_key_nothing_is_answered(file, method):
    async with serving_keys(file, key("alice")) as rig:
        assert await call(rig, method) == "UNAUTHENTICATED UNAUTHENTICATED"
        assert await call(rig, method, **as_("nobody")) == "UNAUTHENTICATED UNAUTHENTICATED"


@pytest.mark.parametrize("method", CALLS)
async def test_each_role_may_call_what_is_its_own(file, method):
    """CONTROL may also do everything that INFER may."""
    async with serving_keys(file, key("user"), key("boss", CONTROL), key("both", INFER | CONTROL)) as rig:
        # refused by the method itself, so the caller was allowed to call it
        refused = {
            "INVALID_ARGUMENT INVALID_FIELD",
            "UNIMPLEMENTED UNSUPPORTED_FEATURE",  # such as Profile: there is no folder
        }
        for name in ("boss", "both"):
            assert await call(rig, method, **as_(name)) in {"OK"} | refused
        expected = {"OK"} if method.split("/")[1] in FOR_ALL else {"PERMISSION_DENIED FORBIDDEN"}
        if method == "InferenceService/Classify":  # the model has no classes
            expected = {"UNIMPLEMENTED UNSUPPORTED_FEATURE"}
        assert await call(rig, method, **as_("user")) in expected


async def test_without_keys_everybody_may_do_everything():
    async with serving() as rig:
        for method in ("InferenceService/Generate", "ControlService/FlushCache"):
            assert await call(rig, method) == "OK"
            assert await call(rig, method, **as_("whoever")) == "OK", "a proxy's header is no matter"


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Basic YWxpY2U6eA==", "psk_alice", "Bearer psk_alic", "Bearer psk_alice x"]
)
async def test_a_malformed_key(file, value):
    async with serving_keys(file, key("alice")) as rig:
        failure = await failure_of(rig.inference.Generate(generate("a"), metadata=[("authorization", value)]))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
        assert "psk" not in failure.message


async def test_two_headers_are_not_one_key(file):
    async with serving_keys(file, key("alice"), key("bob")) as rig:
        metadata = as_("alice")["metadata"] + as_("bob")["metadata"]
        failure = await failure_of(rig.inference.Generate(generate("a"), metadata=metadata))
        assert failure.reason == "UNAUTHENTICATED"


async def test_expired_and_revoked(file):
    past, future = (datetime.now(UTC) + timedelta(days=days) for days in (-1, 1))
    entries = [
        key("old", expires=past),
        key("new", expires=future),
        key("gone", revoked=True),
        key("both", revoked=True, expires=past),
    ]
    async with serving_keys(file, *entries) as rig:
        method = "InferenceService/Generate"
        assert await call(rig, method, **as_("old")) == "UNAUTHENTICATED KEY_EXPIRED"
        assert await call(rig, method, **as_("new")) == "OK"
        assert await call(rig, method, **as_("gone")) == "UNAUTHENTICATED UNAUTHENTICATED"
        assert await call(rig, method, **as_("both")) == "UNAUTHENTICATED UNAUTHENTICATED"


async def test_a_key_for_other_models(file):
    async with serving_keys(file, key("here", models=("x", "fake")), key("there", models=("x",))) as rig:
        for method in ("InferenceService/Generate", "InferenceService/Stream", "ControlService/GetModelInfo"):
            assert await call(rig, method, **as_("here")) == "OK"
            assert await call(rig, method, **as_("there")) == "PERMISSION_DENIED FORBIDDEN"


async def test_health_is_open_and_reflection_is_not(file):
    async with serving_keys(file, key("alice")) as rig:
        assert await rig.health_of() == 1
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(rig.channel)  # type: ignore[arg-type]  # hints know no aio
        ask = reflection_pb2.ServerReflectionRequest(list_services="")

        async def listed(**more: Any) -> list[str]:
            (reply,) = [reply async for reply in stub.ServerReflectionInfo(iter([ask]), **more)]
            return [service.name for service in reply.list_services_response.service]

        assert "penstock.v1.InferenceService" in await listed(**as_("alice"))
        # Nothing is sent: gRPC's asyncio client forgets the status of a call that ends while it writes.
        failure = await failure_of(stub.ServerReflectionInfo().read())
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")


async def test_the_message_of_who_has_no_key_is_not_read(file):
    """An upload that never ends is refused at its headers, and so is a message that does not parse."""

    async def never_ending():
        while True:
            yield b"\xff" * 100_000
            await asyncio.sleep(0.01)

    async with serving_keys(file, key("alice")) as rig:
        for method in ("Generate", "Stream", "Abort"):
            upload: Any = rig.channel.stream_unary(f"/penstock.v1.InferenceService/{method}")
            failure = await failure_of(upload(never_ending()))
            assert failure.reason == "UNAUTHENTICATED"


async def test_a_reload_counts_for_the_next_call_and_not_for_one_that_runs(file):
    engine = fake(hold=True)
    async with serving_keys(file, key("alice"), engine=engine) as rig:
        running = asyncio.ensure_future(rig.inference.Generate(generate("a"), **as_("alice")))
        await until(lambda: len(engine.seen) == 1)
        write(file, [key("alice", revoked=True), key("bob")])
        await rig.server.reload_keys()
        method = "InferenceService/Generate"
        assert await call(rig, method, **as_("alice")) == "UNAUTHENTICATED UNAUTHENTICATED"
        engine.release()
        assert await call(rig, method, **as_("bob")) == "OK"
        assert (await asyncio.wait_for(running, 20)).outputs[0].text.endswith("z")


async def test_a_file_that_does_not_parse_keeps_the_keys(file, caplog):
    async with serving_keys(file, key("alice")) as rig:
        for content in ("{", '{"version": 1, "keys": [{"id": "alice", "roles": []}]}'):
            file.write_text(content)
            caplog.clear()
            await rig.server.reload_keys()
            assert await call(rig, "InferenceService/Generate", **as_("alice")) == "OK"
            (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
            assert str(file) in error.getMessage()
            assert error.exc_info is None
        file.unlink()
        await rig.server.reload_keys()
        assert await call(rig, "InferenceService/Generate", **as_("alice")) == "OK"


async def test_whatever_goes_wrong_in_reading_keeps_the_keys(file, caplog, monkeypatch):
    """Also unexpected errors, and a FIFO, which could be waited for for ever."""
    async with serving_keys(file, key("alice")) as rig:
        file.unlink()
        os.mkfifo(file)
        await asyncio.wait_for(rig.server.reload_keys(), 20)
        assert "could not be read again, so the server keeps those it has" in caplog.text
        assert "no regular file" in caplog.text
        caplog.clear()

        def broken(path):
            raise RuntimeError("a bug")

        monkeypatch.setattr("penstock.service.access.keys.read_keys", broken)
        await rig.server.reload_keys()
        assert (
            "could not be read again, so the server keeps those it has: RuntimeError('a bug')" in caplog.text
        )
        assert await call(rig, "InferenceService/Generate", **as_("alice")) == "OK"


async def test_a_file_that_others_may_read_is_warned_about(file, caplog):
    write(file, [key("alice")]).chmod(0o644)
    async with serving(keys=file):
        assert f"{file} can be read by everybody" in caplog.text


async def test_no_keys_are_no_open_door(file):
    async with serving_keys(file) as rig:
        assert await call(rig, "ControlService/GetLoad") == "UNAUTHENTICATED UNAUTHENTICATED"


async def test_a_bad_file_ends_the_start(file):
    with pytest.raises(ConfigError, match=r"keys\.json cannot be read"):
        async with serving(keys=file):
            pass
    file.write_text("{}")
    with pytest.raises(ConfigError, match="version: must be 1"):
        async with serving(keys=file):
            pass
