"""Bad requests: every field at both ends of its range, all violations in one reply, and bytes that are no
request.
"""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.requests.request import MAX_STOP_TOKEN_IDS
from penstock.service.requests.generate import Features, to_job
from penstock.service.servicers.serving import limits_of
from penstock.v1 import types_pb2
from tests.service.rig import collect, failure_of, fake, generate, serving, stream
from tests.support.models.byte_text import VOCAB

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = limits_of(fake(), features=Features())
INF, NAN = math.inf, math.nan
PENALTIES = ("presence_penalty", "frequency_penalty")
U32 = 2**32 - 1


def tokens(*ids):
    return types_pb2.TokenIds(ids=ids)


def chat(*turns):
    return {"messages": [types_pb2.ChatMessage(role=role, content=content) for role, content in turns]}


def limit(seconds=0, nanos=0):
    return {"time_limit": Duration(seconds=seconds, nanos=nanos)}


BAD = [
    ({"prompt": ""}, {"prompt"}),
    ({"prompt": None}, {"input"}),
    ({"prompt": None, "prompt_token_ids": tokens()}, {"prompt_token_ids.ids"}),
    ({"prompt": None, "prompt_token_ids": tokens(VOCAB)}, {"prompt_token_ids.ids[0]"}),
    (
        {"prompt": None, "prompt_token_ids": tokens(1, U32, 2, VOCAB)},
        {"prompt_token_ids.ids[1]", "prompt_token_ids.ids[3]"},
    ),
    ({"prompt": None, "chat": {}}, {"chat.messages"}),
    ({"prompt": None, "chat": chat(("user", "x"), ("User", "x"))}, {"chat.messages[1].role"}),
    ({"request_id": "x" * 129}, {"request_id"}),
    *(({"sampling": {"temperature": v}}, {"sampling.temperature"}) for v in (-0.001, 100.1, INF, -INF, NAN)),
    *(({"sampling": {"top_p": v}}, {"sampling.top_p"}) for v in (0.0, -1.0, 1.0001, INF, NAN)),
    *(({"sampling": {"top_k": v}}, {"sampling.top_k"}) for v in (2**31, U32)),
    *(({"sampling": {"min_p": v}}, {"sampling.min_p"}) for v in (-0.001, 1.001, NAN)),
    *(({"sampling": {p: v}}, {f"sampling.{p}"}) for p in PENALTIES for v in (-2.01, 2.01, INF, NAN)),
    *(
        ({"sampling": {"repetition_penalty": v}}, {"sampling.repetition_penalty"})
        for v in (0.0, -1.0, INF, NAN)
    ),
    *(({"sampling": {"n": v}}, {"sampling.n"}) for v in (0, 129, U32)),
    *(({"sampling": {"logit_bias": {3: v}}}, {"sampling.logit_bias[3]"}) for v in (INF, NAN)),
    (
        {"sampling": {"logit_bias": {VOCAB: 1.0, U32: 1.0, 0: 1.0}}},
        {f"sampling.logit_bias[{VOCAB}]", f"sampling.logit_bias[{U32}]"},
    ),
    ({"sampling": {"bad_words": ["x", " ", "y" * 1001]}}, {"sampling.bad_words[1]", "sampling.bad_words[2]"}),
    ({"sampling": {"bad_words": ["x"] * 1001}}, {"sampling.bad_words"}),
    ({"sampling": {"allowed_token_ids": [0, VOCAB]}}, {"sampling.allowed_token_ids[1]"}),
    ({"sampling": {"allowed_token_ids": [0] * (VOCAB + 1)}}, {"sampling.allowed_token_ids"}),
    ({"sampling": {"n": 0, "top_p": 2}}, {"sampling.n", "sampling.top_p"}),
    ({"stopping": {"max_tokens": 0}}, {"stopping.max_tokens"}),
    ({"stopping": {"max_tokens": 3, "min_tokens": 4}}, {"stopping.min_tokens"}),
    ({"stopping": {"stop": [""]}}, {"stopping.stop[0]"}),
    ({"stopping": {"stop": ["x", "y" * 257]}}, {"stopping.stop[1]"}),
    ({"stopping": {"stop": ["x"] * 17}}, {"stopping.stop"}),
    ({"stopping": {"stop_token_ids": [0, VOCAB]}}, {"stopping.stop_token_ids[1]"}),
    ({"stopping": {"stop_token_ids": range(MAX_STOP_TOKEN_IDS)}}, {"stopping.stop_token_ids"}),
    ({"stopping": {"stop_token_ids": range(MAX_STOP_TOKEN_IDS + 1)}}, {"stopping.stop_token_ids"}),
    *(
        ({"stopping": limit(*v)}, {"stopping.time_limit"})
        for v in ((), (-1,), (0, -1), (1, -1), (-1, 1), (0, 10**9), (2**62, 0))
    ),
    ({"output": {"logprobs": 21}}, {"output.logprobs"}),
    ({"output": {"logprobs": U32}}, {"output.logprobs"}),
    ({"output": {"logprobs": 0, "token_ids": False}}, {"output.logprobs"}),
    ({"output": {"text": False}, "stopping": {"stop": ["x"]}}, {"stopping.stop"}),
    ({"cache": {"cache_salt": "x" * 257}}, {"cache.cache_salt"}),
]  # fmt: skip
FOUND_LATER = [
    ({"prompt": None, "chat": chat(("user", "x"), ("system", "x"))}, {"chat.messages"}),
    ({"sampling": {"logit_bias": dict.fromkeys(range(VOCAB), -INF)}}, {"sampling.logit_bias"}),
    (
        {"sampling": {"allowed_token_ids": [97, 3], "bad_words": ["a"], "logit_bias": {3: -INF}}},
        {"sampling.allowed_token_ids"},
    ),
]
"""What is found when the prompt is rendered, or when all that forbids tokens is put together."""
GOOD = [
    {"request_id": "x" * 128},
    *({"sampling": {"temperature": v}} for v in (0.0, 1e-300, 100.0)),
    *({"sampling": {"top_p": v}} for v in (5e-324, 1.0)),
    *({"sampling": {"top_k": v}} for v in (0, 2**31 - 1)),
    *({"sampling": {"min_p": v}} for v in (0.0, 1.0)),
    *({"sampling": {p: v}} for p in PENALTIES for v in (-2.0, 2.0)),
    *({"sampling": {"repetition_penalty": v}} for v in (1e-300, 0.001, 1000.0, 1e300)),
    {"sampling": {"n": 1}},
    {"sampling": {"logit_bias": {0: -INF, VOCAB - 1: 3e38, 1: -3e38, 2: 0.0}}},
    {"sampling": {"logit_bias": dict.fromkeys(range(1, VOCAB), -INF)}},
    {"sampling": {"bad_words": ["y" * 1000, *"ab" * 499]}},
    {"sampling": {"allowed_token_ids": [*range(VOCAB - 2), 0, 0]}},
    *({"sampling": {"seed": v}} for v in (0, 2**64 - 1)),
    {"stopping": {"max_tokens": 1, "min_tokens": 1}},
    {"stopping": {"max_tokens": U32, "min_tokens": U32}},
    {"stopping": {"stop": ["\u20ac" * 256] * 16}},
    {"stopping": {"stop_token_ids": [0, VOCAB - 1]}},
    {"stopping": {"stop_token_ids": range(MAX_STOP_TOKEN_IDS - 1)}},
    {"stopping": limit(315_576_000_000, 999_999_999)},
    {"output": {"logprobs": 20}},
    {"output": {"logprobs": 0}},
    {"cache": {"cache_salt": "\u20ac" * 256}},
    {"prompt": None, "prompt_token_ids": tokens(0, VOCAB - 1)},
    {"prompt": None, "chat": chat(("system", ""), ("user", ""), ("assistant", ""))},
]


@pytest.mark.parametrize(("fields", "violated"), BAD, ids=[str(i) for i in range(len(BAD))])
async def test_out_of_range(fields, violated):
    """What is told before anything else is done; `test_all_violations_in_one_reply` shows it on the wire."""
    fields = {"prompt": "y", **fields}
    for message in (generate(**fields), stream(**fields)):
        with pytest.raises(InvalidRequest) as refused:
            to_job(message, LIMITS)
        assert {violation.field for violation in refused.value.violations} == violated
        assert all(violation.description for violation in refused.value.violations)


async def check_refused(rig, fields, violated):
    """Check that both RPCs refuse it with these violations before anything comes to the engine."""
    for call in (
        rig.inference.Generate(generate(**fields)),
        rig.inference.Stream(stream(**fields)).read(),
    ):
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert set(failure.violations) == violated
        assert all(failure.violations.values())
    assert not rig.engine.seen


@pytest.mark.parametrize(
    ("fields", "violated"), FOUND_LATER, ids=["template", "all are biased away", "nothing left"]
)
async def test_found_later(rig, fields, violated):
    await check_refused(rig, {"prompt": "y", **fields}, violated)


@pytest.mark.parametrize("fields", GOOD, ids=[str(i) for i in range(len(GOOD))])
async def test_in_range(rig, fields):
    """The last allowed value at both ends."""
    await rig.inference.Generate(generate(**{"prompt": "y", **fields}))
    assert len(rig.engine.seen) == 1


async def test_min_tokens_per_message_range(rig):
    failure = await failure_of(rig.inference.Stream(stream("a", min_tokens_per_message=0)).read())
    assert set(failure.violations) == {"min_tokens_per_message"}
    await collect(rig.inference.Stream(stream("a", min_tokens_per_message=U32)))


async def test_all_violations_in_one_reply(rig):
    fields = {
        "prompt": "",
        "request_id": "x" * 200,
        "sampling": {"temperature": -1, "top_p": 2, "min_p": 2, "top_k": 2**31},
        "stopping": {"max_tokens": 0, "stop": [""], "stop_token_ids": [999], **limit(-1)},
        "output": {"logprobs": 99},
        "cache": {"cache_salt": "x" * 999, "bypass_prefix_cache": True},
    }
    violated = {
        "request_id",
        "prompt",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.top_k",
        "stopping.max_tokens",
        "stopping.stop[0]",
        "stopping.stop_token_ids[0]",
        "stopping.time_limit",
        "output.logprobs",
        "cache.cache_salt",
    }
    await check_refused(rig, fields, violated)


async def test_unknown_model(rig):
    failure = await failure_of(rig.inference.Generate(generate("a", model="Fake")))
    assert (failure.code.name, failure.reason) == ("NOT_FOUND", "UNKNOWN_MODEL")
    assert failure.info.metadata["served_model"] == "fake"


async def test_of_several_kinds_of_refusal_the_model_comes_first_then_the_unsupported(rig):
    """An unsupported field may change what the others mean, so ranges are reported only when none is left."""
    fields: dict[str, Any] = {"adapter": "x", "sampling": {"temperature": -1}, "stopping": {"max_tokens": 0}}
    too_long = {"prompt": None, "prompt_token_ids": tokens(*[1] * 99), "adapter": "x"}
    for call, reason in (
        (generate("a", model="other", **fields), "UNKNOWN_MODEL"),
        (generate("a", **fields), "UNSUPPORTED_FEATURE"),
        (generate(**too_long), "UNSUPPORTED_FEATURE"),
    ):
        assert (await failure_of(rig.inference.Generate(call))).reason == reason


async def test_prompt_too_long_tells_both_numbers():
    async with serving(fake(max_model_len=8)) as rig:
        assert (await rig.inference.Generate(generate("a" * 7))).outputs[0].text == "b"
        failure = await failure_of(rig.inference.Generate(generate("a" * 8)))
    assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    assert dict(failure.info.metadata) == {"prompt_tokens": "8", "max_prompt_tokens": "7"}


async def test_megabytes_of_text_are_refused_without_tokenizing(monkeypatch):
    """No token of the fake engine stands for more than 7 characters; the reported number is the least that it
    can have.
    """
    async with serving(fake(max_model_len=8)) as rig:
        monkeypatch.setattr(type(rig.engine.text), "encode", None)
        failure = await failure_of(rig.inference.Generate(generate("a" * 57)))
    assert dict(failure.info.metadata) == {"prompt_tokens": "9", "max_prompt_tokens": "7"}


async def test_megabytes_of_chat_are_refused_without_tokenizing(monkeypatch):
    """Counted as rendered: "u:" + content + "|"."""
    async with serving(fake(max_model_len=8)) as rig:
        monkeypatch.setattr(type(rig.engine.text), "encode", None)
        failure = await failure_of(rig.inference.Generate(generate(chat=chat(("user", "a" * 54)))))
    assert dict(failure.info.metadata) == {"prompt_tokens": "9", "max_prompt_tokens": "7"}


async def test_a_great_many_turns_in_one_chat_are_refused():
    """Each has two bytes on the wire."""
    turns = [("user", "")] * 1000
    async with serving(fake(max_model_len=10**5)) as rig:
        await rig.inference.Generate(generate(chat=chat(*turns), stopping={"max_tokens": 1}))
        failure = await failure_of(rig.inference.Generate(generate(chat=chat(*turns * 10, ("user", "")))))
    assert failure.violations == {"chat.messages": "at most 10000 messages, not 10001"}


async def test_millions_of_bad_ids_are_one_short_reply():
    async with serving(fake(max_model_len=10**7)) as rig:
        request = generate(prompt_token_ids={"ids": [VOCAB] * 10**6})
        failure = await failure_of(rig.inference.Generate(request))
    assert failure.reason == "INVALID_FIELD"
    assert "prompt_token_ids.ids[0]" in failure.violations


async def test_exceeds_kv_capacity():
    async with serving(fake(page_size=1, num_pages=4)) as rig:
        failure = await failure_of(rig.inference.Generate(generate("aaaaa")))
    assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "EXCEEDS_KV_CAPACITY")


# -- bytes --

GARBAGE = {
    "truncated": b"\x0a\x05ab",
    "not protobuf": b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    "invalid utf-8": b"\x1a\x02\xc3\x28",
    "group never ended": b"\x0b",
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize(
    "method", ["InferenceService/Generate", "InferenceService/Abort", "ControlService/Tokenize"]
)
async def test_undecodable(rig, method, name):
    data = GARBAGE[name].replace(b"\x1a", b"\x0a") if "Generate" not in method else GARBAGE[name]
    failure = await failure_of(rig.raw(method, data))
    assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z", "and the server lives on"


async def test_undecodable_stream(rig):
    method: Any = rig.channel.unary_stream("/penstock.v1.InferenceService/Stream")
    assert (await failure_of(method(GARBAGE["invalid utf-8"]).read())).reason == "INVALID_FIELD"


async def test_undecodable_upload(rig):
    call: Any = rig.channel.stream_unary("/penstock.v1.InferenceService/UpdateWeights")
    assert (await failure_of(call(iter([b"\xff"])))).reason == "INVALID_FIELD"


async def test_wrong_wire_type_and_newer_field(rig):
    wrong = await failure_of(rig.raw("InferenceService/Generate", b"\x1a\x01a\x30\x05"))
    assert wrong.violations == {"sampling": "has the wrong wire type"}
    newer = await failure_of(rig.raw("InferenceService/Generate", b"\x1a\x01a\xd8\x06\x05"))
    assert (newer.reason, newer.info.metadata["field"]) == ("UNSUPPORTED_FEATURE", "GenerateRequest#107")


async def test_unknown_method_is_unimplemented(rig):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await rig.raw("InferenceService/Nope", b"")
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_message_above_the_receive_limit():
    """Up to twice the limit the server says what is wrong; above that gRPC refuses without details."""
    async with serving(max_receive_bytes=1000) as rig:
        failure = await failure_of(rig.inference.Generate(generate("a" * 1000)))
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
        assert dict(failure.info.metadata) == {"bytes": "1003", "max_bytes": "1000"}
        with pytest.raises(grpc.aio.AioRpcError) as bare:
            await rig.inference.Generate(generate("a" * 2000))
        assert bare.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"
