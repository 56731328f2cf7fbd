"""Messages of very many small parts are refused before protobuf parses them."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.errors import InvalidRequest, UnsupportedFeature
from penstock.service.requests import support as support_module
from penstock.service.requests.support import check_parts
from penstock.service.rpcs.interceptors import decode
from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.rig import failure_of, fake, generate, serving

REQUEST = inference_pb2.GenerateRequest.DESCRIPTOR
LARGE = "x" * support_module.LOOKED_AT_BYTES


@pytest.fixture
def few(monkeypatch):
    """Bounds that a test can reach, for messages of any size."""
    monkeypatch.setattr(support_module, "LOOKED_AT_BYTES", 0)
    monkeypatch.setattr(support_module, "MAX_FIELDS", 10)
    monkeypatch.setattr(support_module, "MAX_IDS", 100)


def turns(count):
    return types_pb2.ChatPrompt(messages=[types_pb2.ChatMessage() for _ in range(count)])


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (generate(chat=turns(10)), "chat"),
        (generate("a", sampling={"bad_words": [""] * 9}), "sampling"),
        (generate("a", sampling={"logit_bias": dict.fromkeys(range(9), 1.0)}), "sampling"),
        (generate("a", stopping={"stop": [""] * 9}), "stopping"),
        (generate(prompt_token_ids={"ids": range(101)}), "prompt_token_ids.ids"),
        (generate(prompt_token_ids={"ids": [2**32 - 1] * 101}), "prompt_token_ids.ids"),
        (generate("a", sampling={"allowed_token_ids": range(101)}), "sampling.allowed_token_ids"),
        (control_pb2.DetokenizeRequest(token_ids=range(101)), "token_ids"),
    ],
)
def test_too_many_parts(few, request_, field):
    with pytest.raises(InvalidRequest) as caught:
        check_parts(request_.DESCRIPTOR, request_.SerializeToString())
    (violation,) = caught.value.violations
    assert violation.field == field
    assert "more than 10" in violation.description


@pytest.mark.parametrize(
    "request_",
    [
        generate(chat=turns(9)),
        generate("a" * 5000, sampling={"logit_bias": dict.fromkeys(range(8), 1.0)}),
        generate(prompt_token_ids={"ids": [2**32 - 1] * 100}),
        generate("a", stopping={"time_limit": {"seconds": 5, "nanos": 7}}, priority=-1),
    ],
)
def test_as_many_as_there_may_be(few, request_):
    check_parts(REQUEST, request_.SerializeToString())


def test_unpacked_ids_are_fields(few):
    packed = generate(prompt_token_ids={"ids": range(11)}).SerializeToString()
    check_parts(REQUEST, packed)
    field = REQUEST.fields_by_name["prompt_token_ids"].number
    with pytest.raises(InvalidRequest, match="more than 10 fields"):
        check_parts(REQUEST, bytes([field << 3 | 2, 22]) + b"\x08\x01" * 11)


def test_a_group_hides_nothing(few):
    with pytest.raises(DecodeError, match="wire type 3"):
        check_parts(REQUEST, b"\x0b\x0c" + generate(chat=turns(99)).SerializeToString())


MESSAGES = st.builds(
    lambda text, ids, biases, seconds, count: generate(
        chat={
            "messages": [types_pb2.ChatMessage(role="user", content=text)] * count,
            "template_options_json": text,
        },
        sampling={"logit_bias": biases, "allowed_token_ids": ids, "temperature": 0.5},
        stopping={"stop": [text] * count, "time_limit": {"seconds": seconds}},
    ),
    st.text(max_size=200),
    st.lists(st.integers(0, 2**32 - 1), max_size=50),
    st.dictionaries(st.integers(0, 2**32 - 1), st.floats(width=32), max_size=20),
    st.integers(-(2**40), 2**40),
    st.integers(0, 5),
)


@given(MESSAGES)
def test_whatever_protobuf_writes_is_walked_to_its_end(message):
    data = message.SerializeToString()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support_module, "LOOKED_AT_BYTES", 0)
        check_parts(REQUEST, data)
        assert decode(inference_pb2.GenerateRequest.FromString, data) == message


@given(st.binary(max_size=300))
def test_bytes_that_protobuf_refuses_are_refused(data):
    """What protobuf accepts is accepted, or refused because this contract does not have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support_module, "LOOKED_AT_BYTES", 0)
        try:
            message = inference_pb2.GenerateRequest.FromString(data)
        except (DecodeError, ValueError):
            with pytest.raises((InvalidRequest, UnsupportedFeature)):
                decode(inference_pb2.GenerateRequest.FromString, data)
            return
        try:
            assert decode(inference_pb2.GenerateRequest.FromString, data) == message
        except (InvalidRequest, UnsupportedFeature):
            walked = inference_pb2.GenerateRequest.FromString(data)
            walked.DiscardUnknownFields()
            assert walked.ByteSize() != message.ByteSize()


async def test_protobuf_is_not_asked_to_parse_them(monkeypatch):
    """Two bytes each: four million of them took a fifth of a second in which nothing else ran."""
    monkeypatch.setattr(support_module, "MAX_FIELDS", 1000)
    monkeypatch.setattr(support_module, "SPARE_FIELDS", 0)
    parsed: list[int] = []
    parse = inference_pb2.GenerateRequest.FromString

    def noted(data):
        parsed.append(len(data))
        return parse(data)

    request = generate(chat={"messages": [types_pb2.ChatMessage()] * 2000, "tool_choice": LARGE})
    with pytest.raises(InvalidRequest, match="chat: the request has more than 1000 fields"):
        decode(noted, request.SerializeToString())
    assert parsed == [0]
    async with serving() as rig:
        failure = await failure_of(rig.inference.Generate(request))
    assert failure.violations == {"chat": "the request has more than 1000 fields in all"}


@pytest.mark.ci
async def test_a_bias_for_every_token_of_a_large_vocabulary():
    vocab = 262_144
    biases = dict.fromkeys(range(vocab), 1.0)
    async with serving(fake(vocab_size=vocab)) as rig:
        await rig.inference.Generate(generate("a", sampling={"logit_bias": biases}), timeout=60)
        assert len(rig.engine.seen[0].sampling.logit_bias) == vocab
        many = generate("a", chat=turns(vocab + support_module.SPARE_FIELDS))
        failure = await failure_of(rig.inference.Generate(many, timeout=60))
    most = vocab + support_module.SPARE_FIELDS
    assert failure.violations == {"chat": f"the request has more than {most} fields in all"}
