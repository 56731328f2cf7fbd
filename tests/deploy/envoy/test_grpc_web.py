"""gRPC-Web, as browsers speak it, and gRPC itself, through the real Envoy."""

from __future__ import annotations

import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # ships no hints

from penstock.client import Client, InvalidRequest
from penstock.v1 import inference_pb2, types_pb2
from tests.deploy.envoy.grpc_web import call
from tests.deploy.envoy.running import Gateway

GENERATE, STREAM = "penstock.v1.InferenceService/Generate", "penstock.v1.InferenceService/Stream"

pytestmark = pytest.mark.sweep

as_text = pytest.mark.parametrize("text", [False, True], ids=["binary", "base64"])


def stopping(tokens: int) -> types_pb2.StoppingParams:
    return types_pb2.StoppingParams(max_tokens=tokens)


GREEDY = types_pb2.SamplingParams(temperature=0)


@as_text
def test_a_call_has_one_message_and_trailers(gateway: Gateway, text: bool) -> None:
    request = inference_pb2.GenerateRequest(prompt="Once upon a time", stopping=stopping(12), sampling=GREEDY)
    reply = call(gateway.address, GENERATE, request, gateway.authorization, text=text)
    assert (reply.http_status, reply.code) == (200, 0)
    (message,) = reply.messages
    (output,) = inference_pb2.GenerateResponse.FromString(message).outputs
    with Client(gateway.server, token=gateway.key) as client:
        assert output.text == client.generate("Once upon a time", max_tokens=12, temperature=0).text


@as_text
def test_a_stream_has_many_messages_and_trailers(gateway: Gateway, text: bool) -> None:
    request = inference_pb2.StreamRequest(prompt="Once upon a time", stopping=stopping(40), sampling=GREEDY)
    reply = call(gateway.address, STREAM, request, gateway.authorization, text=text)
    assert reply.code == 0
    events = [inference_pb2.StreamResponse.FromString(message) for message in reply.messages]
    kinds = [event.WhichOneof("event") for event in events]
    assert (kinds[0], kinds[-2:]) == ("started", ["finished", "summary"])
    assert sum(len(event.delta.token_ids) for event in events) == 40


@as_text
def test_a_refusal_has_its_reason_and_its_violations_in_the_trailers(gateway: Gateway, text: bool) -> None:
    request = inference_pb2.StreamRequest(prompt="x", sampling=types_pb2.SamplingParams(top_p=7))
    reply = call(gateway.address, STREAM, request, gateway.authorization, text=text)
    assert (reply.messages, reply.code) == ([], 3)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    (packed_info,) = (one for one in reply.status.details if one.Is(info.DESCRIPTOR))
    (packed_bad,) = (one for one in reply.status.details if one.Is(bad.DESCRIPTOR))
    packed_info.Unpack(info)
    packed_bad.Unpack(bad)
    assert (info.domain, info.reason) == ("penstock", "INVALID_FIELD")
    assert [violation.field for violation in bad.field_violations] == ["sampling.top_p"]


def test_grpc_itself_passes_as_it_is(gateway: Gateway) -> None:
    with Client(gateway.address, token=gateway.key) as client:
        direct = client.generate("Once upon a time", max_tokens=12, temperature=0)
        assert len(direct.outputs[0].token_ids) == 12
        assert client.is_ready()
        with pytest.raises(InvalidRequest) as caught:
            client.generate("x", top_p=7)
        assert caught.value.reason == "INVALID_FIELD"
