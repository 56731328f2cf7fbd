"""The sync client against the handwritten server."""

from __future__ import annotations

import threading

import grpc
import pytest

from penstock import client as api
from penstock.client import (
    AbortOutcome,
    AbortResult,
    Client,
    Delta,
    Finish,
    Finished,
    FinishReason,
    FlushedCache,
    Load,
    ModelInfo,
    NotReady,
    PromptInfo,
    SamplingDefaults,
    ServerInfo,
    Started,
    Summary,
    Timing,
    TokenizerInfo,
    Tokens,
    TracingStatus,
    Usage,
    WeightsVersion,
)
from penstock.v1 import control_pb2, inference_pb2, telemetry_pb2

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def client(server):
    with Client(server.addr) as made:
        yield made


def test_generate(server, client, expected):
    assert client.generate("p", max_tokens=4) == expected
    assert server.calls == [
        inference_pb2.GenerateRequest(prompt="p", stopping={"max_tokens": 4})  # type: ignore[arg-type]
    ]


def test_shortcuts_are_those_of_the_first_output(client, expected):
    answer = client.generate("p")
    assert (answer.text, answer.token_ids) == ("Hello", (5, 6, 7, 8))
    assert answer.finish == Finish(FinishReason.STOP, stop="END")
    assert answer.logprobs is None
    assert answer.weights == expected.outputs[0].weights


def test_stream_events(server, client):
    initial, step_1 = WeightsVersion("initial", 0), WeightsVersion("step-1", 1)
    assert list(client.stream("p", min_tokens_per_message=2)) == [
        Started("r-1", "toy", PromptInfo(3), initial),
        Delta(0, "Hel", (5,)),
        Delta(0, "", (6,)),
        Delta(0, "lo", (7, 8), weights=step_1),
        Finished(0, Finish(FinishReason.STOP, stop="END"), "Hello"),
        Summary(Usage(3, 1, 4, 2), Timing(0.25, 0.5, 1.5, 2)),
    ]
    assert server.calls == [inference_pb2.StreamRequest(prompt="p", min_tokens_per_message=2)]


def test_every_event_has_delta(client):
    assert "".join(event.delta for event in client.stream("p")) == "Hello"


def test_a_stream_folds_into_what_generate_returns(client, expected):
    with client.stream("p") as stream:
        before: str | None = stream.request_id
        assert before is None
        assert stream.result() == expected
        assert stream.result() == expected
        assert stream.text() == "Hello"
        assert stream.request_id == "r-1"
        assert list(stream) == []


def test_leaving_the_block_cancels_on_the_server(server, client):
    server.hold_after = 2
    with client.stream("p") as stream:
        next(stream)
        next(stream)
        assert not server.cancelled.is_set()
    assert server.cancelled.wait(30)
    assert list(stream) == []
    assert stream.text() == "Hel"
    with pytest.raises(api.ProtocolError, match="closed before its end"):
        stream.result()


def test_dropping_the_iterator_cancels_on_the_server(server, client):
    server.hold_after = 2
    for _ in client.stream("p"):
        break
    assert server.cancelled.wait(30)


def test_close_from_another_thread_ends_the_iteration(server, client):
    server.hold_after = 2
    stream = client.stream("p")
    next(stream)
    next(stream)
    threading.Timer(0.1, stream.close).start()
    assert list(stream) == []
    assert server.cancelled.wait(30)


def test_reading_to_the_end_is_no_cancel(server, client):
    with client.stream("p") as stream:
        stream.result()
    client.load()
    assert not server.cancelled.is_set()


def test_failure_midway_keeps_what_came(server, client, failure):
    server.replies = server.replies[:2]
    server.stream_failure = failure(grpc.StatusCode.INTERNAL, "", "the engine died")
    stream = client.stream("p")
    with pytest.raises(api.ServerError, match="the engine died"):
        list(stream)
    assert stream.text() == "Hel"


def test_ok_without_a_summary_is_an_error(server, client):
    server.replies = server.replies[:-1]
    with pytest.raises(api.ProtocolError, match="before its summary"):
        list(client.stream("p"))


def test_breaking_the_order_cancels(server, client):
    server.replies = server.replies[1:]
    server.hold_after = 3
    with pytest.raises(api.ProtocolError, match="delta before started"):
        list(client.stream("p"))
    assert server.cancelled.wait(30)


def test_abort(server, client):
    assert client.abort(["a", "b", "c", "d"], reason="tired") == (
        AbortResult("a", AbortOutcome.ABORTED),
        AbortResult("b", AbortOutcome.ALREADY_FINISHED),
        AbortResult("c", AbortOutcome.NOT_FOUND),
        AbortResult("d", AbortOutcome.UNKNOWN),
    )
    client.abort(all=True)
    assert server.calls == [
        inference_pb2.AbortRequest(
            request_ids=inference_pb2.RequestIds(ids=["a", "b", "c", "d"]), reason="tired"
        ),
        inference_pb2.AbortRequest(all=inference_pb2.AllRequests()),
    ]


def test_info(server, client):
    assert client.model_info(include_tensors=True, include_tokenizer=True) == ModelInfo(
        model="toy",
        architecture="ToyForCausalLM",
        vocab_size=10,
        max_context_tokens=64,
        eos_token_ids=(2, 3),
        default_sampling=SamplingDefaults(temperature=0.0, top_k=20),
        weights=WeightsVersion("step-1", 1),
        features=("chat", "feature_42"),
        tokenizer=TokenizerInfo({"eos_token": "</s>"}, "{{ x }}", "Toy"),
    )
    limits = (4, 8, 16, 100, 1024, 5, ("cpu:0",), 8 << 20, "lookup", 4, 4, 64, 16, True)
    assert client.server_info() == ServerInfo("9.8.7", "i-1", 1, *limits)
    assert client.load() == Load(1, 2, 30, 7, 100, True, WeightsVersion("step-1", 1), 3)
    assert server.calls[0] == control_pb2.GetModelInfoRequest(include_tensors=True, include_tokenizer=True)


def test_flush_cache(server, client):
    assert client.flush_cache() == FlushedCache(pages_freed=12, pages_in_use=3)
    assert server.calls == [control_pb2.FlushCacheRequest()]


def test_set_tracing(server, client):
    assert client.set_tracing() == TracingStatus("steps", "steps", 12, 3, 4)
    assert client.set_tracing("detailed") == TracingStatus("steps", "detailed", 12, 3, 4)
    assert server.calls == [
        telemetry_pb2.SetTracingRequest(),
        telemetry_pb2.SetTracingRequest(level=telemetry_pb2.TRACE_LEVEL_DETAILED),
    ]
    with pytest.raises(
        api.InvalidRequest, match=r"level: must be one of off, requests, steps, detailed"
    ) as caught:
        client.set_tracing("DETAILED")
    assert caught.value.violations[0].field == "level"


def test_flush_cache_on_a_server_without(server, client, failure):
    server.failure = failure(
        grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FEATURE", metadata={"field": "FlushCache"}
    )
    with pytest.raises(api.Unsupported) as caught:
        client.flush_cache()
    assert caught.value.fields == ("FlushCache",)


def test_tokenize_and_back(server, client):
    assert client.tokenize("hi", add_special_tokens=False) == Tokens((4, 5), 64)
    assert client.tokenize(messages=[{"role": "user", "content": "hi"}]) == Tokens((4, 5), 64)
    assert client.detokenize([4, 5], skip_special_tokens=False) == "Hello"
    text, chat, ids = server.calls
    assert text == control_pb2.TokenizeRequest(text="hi", add_special_tokens=False)
    assert [(m.role, m.content) for m in chat.chat.messages] == [("user", "hi")]
    assert ids == control_pb2.DetokenizeRequest(token_ids=[4, 5], skip_special_tokens=False)


def test_metadata_goes_with_every_kind_of_call(server):
    with Client(server.addr, metadata={"authorization": "Bearer x"}) as client:
        client.generate("p", metadata={"traceparent": TRACEPARENT})
        client.stream("p", metadata=[("traceparent", TRACEPARENT)]).result()
        client.load()
    assert [m.get("traceparent") for m in server.metadata] == [TRACEPARENT, TRACEPARENT, None]
    assert {m["authorization"] for m in server.metadata} == {"Bearer x"}


def test_an_existing_channel_stays_open(server):
    with grpc.insecure_channel(server.addr) as channel:
        with Client(channel=channel) as client:
            client.load()
        with Client(channel=channel) as client:
            client.load()
        with pytest.raises(TypeError, match="existing channel"):
            Client(server.addr, channel=channel)


def test_credentials_make_the_channel_secure(server):
    """The server has no TLS, so the handshake must fail, and nothing else."""
    secure = Client(server.addr, credentials=grpc.ssl_channel_credentials())
    with secure as client, pytest.raises(api.Unreachable, match=r"(?i)ssl|tls|handshake"):
        client.load()


def test_wait_ready(server, client):
    client.wait_ready(timeout=30)
    assert client.is_ready()
    server.set_health(False)
    assert not client.is_ready()
    with pytest.raises(NotReady, match=r"not ready within 0\.3 s"):
        client.wait_ready(timeout=0.3)
    threading.Timer(0.2, server.set_health, [True]).start()
    client.wait_ready(timeout=30)


def test_wait_ready_without_a_server():
    with Client("127.0.0.1:1") as client, pytest.raises(NotReady, match=r"not ready within 0\.2 s"):
        client.wait_ready(timeout=0.2)


def test_the_generated_stubs_are_there_for_the_rest(client):
    assert client.control.GetLoad(control_pb2.GetLoadRequest()).running_requests == 1
    assert client.inference.Generate(inference_pb2.GenerateRequest()).model == "toy"


def test_a_server_without_our_health_is_an_error_and_no_wait(server, client, failure):
    server.health_failure = failure(grpc.StatusCode.UNAUTHENTICATED, "", "who are you")
    with pytest.raises(api.Denied, match="who are you"):
        client.wait_ready()


def test_a_connection_that_ends_is_waited_for(server, client, failure):
    server.health_failure = failure(grpc.StatusCode.CANCELLED)
    with pytest.raises(api.NotReady, match="the connection ended"):
        client.wait_ready(timeout=0.3)


def test_closing_the_client_ends_its_streams(server):
    server.hold_after = 1
    client = Client(server.addr)
    stream = client.stream("p")
    next(stream)
    threading.Timer(0.1, client.close).start()
    with pytest.raises(api.Cancelled):
        list(stream)
    assert server.cancelled.wait(30)
