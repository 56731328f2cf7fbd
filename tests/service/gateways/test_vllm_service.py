"""vLLM's gRPC service on a server, asked as a gateway asks it."""

from __future__ import annotations

import asyncio
import io
import json
import math
import zipfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from penstock.service.gateways import smg_common_pb2
from penstock.service.gateways import vllm_engine_pb2 as vllm
from penstock.service.gateways.vllm_service import SERVICE
from penstock.service.requests.generate import Features
from tests.service.key_rig import CONTROL, as_, key, serving_keys
from tests.service.rig import WAIT_S, Rig, failure_of, fake, serving, taken_apart, until
from tests.support.scheduler.byte_runner import logprobs_of

ON = Features(vllm_service=True)
A = list(b"a")
"""The fake engine counts upwards: after "a" come "b", "c" and so on, up to "z" and the end token."""


class Gateway:
    """The stubs of a gateway."""

    def __init__(self, rig: Rig) -> None:
        for method in SERVICE.methods:
            make: Any = rig.channel.unary_stream if method.server_streaming else rig.channel.unary_unary
            call = make(
                f"/{SERVICE.full_name}/{method.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    async def generate(
        self, *, stream: bool = True, ids: list[int] = A, **params: Any
    ) -> list[vllm.GenerateResponse]:
        """All replies to a request for these ids."""
        return [one async for one in self.Generate(asked(stream=stream, ids=ids, **params), timeout=WAIT_S)]


def asked(*, stream: bool = True, ids: list[int] = A, **params: Any) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id="one",
        tokenized=vllm.TokenizedInput(original_text="not read", input_ids=ids),
        sampling_params=vllm.SamplingParams(**({"temperature": 0.0, "max_tokens": 3} | params)),
        stream=stream,
    )


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with serving(fake(page_size=1, cached=["a"]), features=ON) as served:
        yield served


@pytest.fixture
def gateway(rig: Rig) -> Gateway:
    return Gateway(rig)


async def test_a_stream_has_a_chunk_for_each_delta_and_then_the_end(gateway: Gateway) -> None:
    *chunks, last = await gateway.generate(ids=[*A, *A])
    assert [one.WhichOneof("response") for one in chunks] == ["chunk"] * len(chunks)
    sent = [token for one in chunks for token in one.chunk.token_ids]
    assert bytes(sent) == b"bcd"
    assert [one.chunk.completion_tokens for one in chunks] == [len(one.chunk.token_ids) for one in chunks]
    assert {one.chunk.prompt_tokens for one in chunks} == {2}
    end = last.complete
    assert (end.finish_reason, end.prompt_tokens, end.cached_tokens) == ("length", 2, 1)
    assert list(end.output_ids) == list(chunks[-1].chunk.token_ids)  # once more, as vLLM does
    assert end.completion_tokens == len(end.output_ids)


async def test_without_a_stream_there_is_only_the_end_with_everything(gateway: Gateway) -> None:
    (reply,) = await gateway.generate(stream=False, ids=[*A, *A], logprobs=2)
    end = reply.complete
    assert bytes(end.output_ids) == b"bcd"
    assert (end.finish_reason, end.completion_tokens) == ("length", 3)
    assert (end.prompt_tokens, end.cached_tokens) == (2, 1)
    assert list(end.output_logprobs.token_ids) == list(b"bcd")
    for at, token in enumerate(b"bcd"):
        told = logprobs_of(token, 2)
        assert end.output_logprobs.token_logprobs[at] == pytest.approx(told.sampled)
        top = end.output_logprobs.top_logprobs[at]
        assert list(top.token_ids) == [one for one, _ in told.top]
        assert list(top.values) == pytest.approx([one for _, one in told.top])


async def test_each_output_has_its_own_chunks_and_end(gateway: Gateway) -> None:
    replies = await gateway.generate(n=3)
    for index in range(3):
        sent = [token for one in replies if one.chunk.index == index for token in one.chunk.token_ids]
        assert bytes(sent) == bytes(range(ord("b") + index, ord("b") + index + 3))
    assert [one.complete.index for one in replies[-3:]] == [0, 1, 2]


async def test_the_prompt_s_logprobs_come_first(gateway: Gateway) -> None:
    replies = await gateway.generate(ids=list(b"abc"), prompt_logprobs=1)
    told = replies[0].chunk.input_logprobs
    assert list(told.token_ids) == list(b"abc")
    assert not told.token_logprobs[0].HasField("value")
    assert all(math.isfinite(one.value) and one.HasField("value") for one in told.token_logprobs[1:])
    assert len(told.top_logprobs) == 3
    assert not any(one.chunk.HasField("input_logprobs") for one in replies[1:-1])


@pytest.mark.parametrize(
    ("params", "reason", "matched"),
    [
        ({"max_tokens": 50}, "stop", None),  # the end token comes after "z"
        ({"max_tokens": 50, "stop": ["fg"]}, "stop", "fg"),
        ({"max_tokens": 50, "stop_token_ids": [ord("e")]}, "stop", ord("e")),
        ({"max_tokens": 2}, "length", None),
    ],
)
async def test_the_end_says_why(gateway: Gateway, params: Any, reason: str, matched: Any) -> None:
    replies = await gateway.generate(**params)
    end = replies[-1].complete
    assert end.finish_reason == reason
    kind = end.WhichOneof("matched_stop")
    assert (kind and getattr(end, kind)) == matched
    sent = bytes(token for one in replies[:-1] for token in one.chunk.token_ids if token < 128)
    if matched == "fg":
        assert sent == b"bcdefg"
    if matched == ord("e"):
        assert sent == b"bcde"  # with the token that ended it, as vLLM has it


async def test_an_aborted_request_ends_as_such(rig: Rig, gateway: Gateway) -> None:
    async with serving(fake(hold=True), features=ON) as held:
        caller = Gateway(held)
        running = asyncio.create_task(caller.generate())
        await until(lambda: held.engine.load().num_running + held.engine.load().num_waiting == 1)
        await caller.Abort(vllm.AbortRequest(request_ids=["one", "unknown"]))
        replies = await asyncio.wait_for(running, WAIT_S)
    assert replies[-1].complete.finish_reason == "abort"
    assert await gateway.Abort(vllm.AbortRequest()) == vllm.AbortResponse()


async def test_truncation_keeps_the_last_tokens(gateway: Gateway, rig: Rig) -> None:
    replies = await gateway.generate(ids=list(b"xyzabc"), truncate_prompt_tokens=2)
    assert {one.chunk.prompt_tokens for one in replies[:-1]} == {2}
    long = list(b"abcdefgh" * 20)  # more than the context
    replies = await gateway.generate(ids=long, truncate_prompt_tokens=-1)
    assert 0 < replies[0].chunk.prompt_tokens < rig.engine.info.max_model_len
    failure = await refused(gateway, ids=long)
    assert failure.reason == "PROMPT_TOO_LONG"


async def refused(gateway: Gateway, **request: Any) -> Any:
    return await failure_of(gateway.generate(**request))


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1.0}, "sampling_params.temperature"),
        ({"logprobs": -1}, "sampling_params.logprobs"),
        ({"prompt_logprobs": 5000}, "sampling_params.prompt_logprobs"),
        ({"logit_bias": {-5: 1.0}}, "sampling_params.logit_bias"),
        ({"truncate_prompt_tokens": 0}, "sampling_params.truncate_prompt_tokens"),
        ({"min_tokens": 9}, "sampling_params.min_tokens"),
        ({"ids": [5000]}, "tokenized.input_ids[0]"),
        ({"ids": []}, "tokenized.input_ids"),
        ({"n": 500}, "sampling_params.n"),
    ],
)
async def test_what_is_wrong_is_named_as_the_gateway_names_it(
    gateway: Gateway, params: Any, field: str
) -> None:
    failure = await refused(gateway, **params)
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert field in failure.violations


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"kv_transfer_params": vllm.KvTransferParams(remote_port=1)}, "kv_transfer_params"),
        ({"mm_inputs": vllm.MultimodalInputs()}, "mm_inputs"),
        ({"media_refs": vllm.MediaRefs()}, "media_refs"),
        ({"extra_mm_inputs": [vllm.MultimodalInputs()]}, "extra_mm_inputs"),
        ({"sampling_params": vllm.SamplingParams(structural_tag="{}")}, "sampling_params.structural_tag"),
    ],
)
async def test_what_penstock_has_not_is_refused_by_name(gateway: Gateway, change: Any, field: str) -> None:
    message = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=A), **change)
    with pytest.raises(grpc.aio.AioRpcError) as told:
        async for _ in gateway.Generate(message, timeout=WAIT_S):
            pass
    failure = taken_apart(told.value)
    assert failure.reason == "UNSUPPORTED_FEATURE"
    assert field in failure.message


async def test_fields_that_are_newer_than_this_server_are_refused(gateway: Gateway) -> None:
    newer = vllm.GenerateRequest.FromString(asked().SerializeToString() + b"\xf8\x3f\x01")  # field 1023
    with pytest.raises(grpc.aio.AioRpcError) as told:
        async for _ in gateway.Generate(newer, timeout=WAIT_S):
            pass
    assert "GenerateRequest#1023" in taken_apart(told.value).message


async def test_constraints_reach_the_grammar(gateway: Gateway) -> None:
    replies = await gateway.generate(stream=False, max_tokens=20, regex="x[0-9]y")
    assert bytes(token for token in replies[0].complete.output_ids if token < 128) == b"x0y"
    choice = vllm.ChoiceConstraint(choices=["yes", "no"])
    replies = await gateway.generate(stream=False, max_tokens=20, choice=choice)
    assert bytes(token for token in replies[0].complete.output_ids if token < 128) in (b"yes", b"no")
    replies = await gateway.generate(stream=False, json_object=False)
    assert bytes(replies[0].complete.output_ids) == b"bcd"


async def test_the_server_describes_itself(rig: Rig, gateway: Gateway) -> None:
    info = await gateway.GetModelInfo(vllm.GetModelInfoRequest())
    assert (info.served_model_name, info.is_generation) == ("fake", True)
    assert (info.max_context_length, info.vocab_size) == (64, rig.engine.info.vocab_size)
    assert list(info.architectures) == ["FakeForCausalLM"]
    assert list(info.eos_token_ids) == list(rig.engine.info.eos_token_ids)
    assert json.loads(info.default_sampling_params_json)["temperature"] == 1.0
    state = await gateway.GetServerInfo(vllm.GetServerInfoRequest())
    assert (state.active_requests, state.is_paused, state.data_parallel_size) == (0, False, 1)
    assert state.max_num_seqs == rig.engine.config.max_num_seqs
    loads = await gateway.GetLoads(vllm.GetLoadsRequest())
    assert [load.dp_rank for load in loads.loads] == [0]
    assert loads.loads[0].max_running_requests == rig.engine.config.max_num_seqs
    assert not (await gateway.GetLoads(vllm.GetLoadsRequest(dp_rank=1))).loads
    assert (await gateway.HealthCheck(vllm.HealthCheckRequest())).healthy


async def test_health_follows_the_engine(rig: Rig, gateway: Gateway) -> None:
    rig.engine.changes.break_weights("an update has failed")
    assert not (await gateway.HealthCheck(vllm.HealthCheckRequest())).healthy


async def test_the_tokenizer_is_sent_as_an_archive(tmp_path: Path) -> None:
    """In parts, with the digest of the whole; weights and other files are not in it."""
    large = bytes(range(256)) * 2000
    for name, data in {
        "tokenizer.json": large,
        "chat_template.jinja": b"{{ x }}",
        "model.safetensors": b"not this",
        "notes.txt": b"nor this",
    }.items():
        (tmp_path / name).write_bytes(data)
    engine = fake()
    engine.info = replace(engine.info, directory=tmp_path)
    async with serving(engine, features=ON) as rig:
        call = Gateway(rig).GetTokenizer(smg_common_pb2.GetTokenizerRequest(), timeout=WAIT_S)
        parts = [part async for part in call]
    archive = zipfile.ZipFile(io.BytesIO(b"".join(part.data for part in parts)))
    assert {name: archive.read(name) for name in archive.namelist()} == {
        "tokenizer.json": large,
        "chat_template.jinja": b"{{ x }}",
    }
    assert [bool(part.sha256) for part in parts] == [False] * (len(parts) - 1) + [True]


async def test_a_model_without_files_has_no_tokenizer_to_send(gateway: Gateway) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as told:
        async for _ in gateway.GetTokenizer(smg_common_pb2.GetTokenizerRequest(), timeout=WAIT_S):
            pass
    assert taken_apart(told.value).reason == "UNSUPPORTED_FEATURE"


async def test_the_service_is_off_by_default() -> None:
    async with serving(fake()) as rig:
        failure = await failure_of(Gateway(rig).HealthCheck(vllm.HealthCheckRequest()))
        assert failure.code is grpc.StatusCode.UNIMPLEMENTED


async def test_keys_hold_for_it(tmp_path: Path) -> None:
    """A key is needed; and nobody aborts what is another's, not even an operator."""
    keys = [key("alice"), key("operator", CONTROL)]
    async with serving_keys(tmp_path / "keys", *keys, engine=fake(hold=True), features=ON) as rig:
        gateway = Gateway(rig)
        failure = await failure_of(gateway.HealthCheck(vllm.HealthCheckRequest()))
        assert failure.code is grpc.StatusCode.UNAUTHENTICATED
        call = gateway.Generate(asked(), timeout=WAIT_S, **as_("alice"))
        await until(lambda: rig.engine.load().num_running + rig.engine.load().num_waiting == 1)
        await gateway.Abort(vllm.AbortRequest(request_ids=["one"]), **as_("operator"))
        rig.engine.release()
        replies = [one async for one in call]
        assert replies[-1].complete.finish_reason == "length"
