"""A server written by hand: it implements the contract with canned replies, and records what it was asked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from penstock.client import Generation
from penstock.v1 import (
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    telemetry_pb2,
    types_pb2,
    weights_pb2,
)
from tests.clients.canned import EXPECTED, STEP_1, generate_reply, stream_replies
from tests.clients.failing import Failure
from tests.clients.profiling import FakeProfile
from tests.clients.updates import BEFORE, MAX_CHUNK_BYTES, FakeUpdates
from tests.clients.watching import FakeWatch

HEALTH_NAME = "penstock.v1.InferenceService"


class _Health(health.HealthServicer):
    """The standard health servicer, which `health_failure` makes refuse."""

    def __init__(self, server: FakeServer) -> None:
        super().__init__()
        self._server = server

    def Check(self, request, context):
        self._server._fail(self._server.health_failure, context)
        return super().Check(request, context)


class FakeServer(inference_pb2_grpc.InferenceServiceServicer, control_pb2_grpc.ControlServiceServicer):
    """Answers "Hello". `failure` makes every call fail; `hold_after` makes a stream wait for ever."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.remaining: list[float | None] = []
        """Seconds until the deadline of each call."""
        self.failure: Failure | None = None
        self.failures: list[Failure] = []
        """Failures of the next calls, one for each."""
        self.failing_calls: set[int] | None = None
        """The calls that `failure` applies to, counted from 1; None means all."""
        self.stream_failure: Failure | None = None
        """The failure that ends a stream after its replies."""
        self.answer: Callable[[inference_pb2.GenerateRequest], inference_pb2.GenerateResponse]
        self.answer = lambda request: generate_reply()
        self.replies: Sequence[inference_pb2.StreamResponse] = stream_replies()
        self.next_replies: Callable[[inference_pb2.StreamRequest], Sequence[inference_pb2.StreamResponse]]
        self.next_replies = lambda request: self.replies
        self.embeddings = inference_pb2.EmbedResponse()
        """What Embed answers."""
        self.scores = inference_pb2.ScoreResponse()
        """What Score answers."""
        self.ranking = inference_pb2.RerankResponse()
        """What Rerank answers."""
        self.classes = inference_pb2.ClassifyResponse()
        """What Classify answers."""
        self.hold_after: int | None = None
        """The number of events after which a stream sends nothing until it is cancelled."""
        self.asked = threading.Event()
        self.cancelled = threading.Event()
        self.paused = True
        self.name = "toy"
        self.default_sampling = types_pb2.SamplingParams(temperature=0.0, top_k=20)
        self.health_failure: Failure | None = None
        self.updates = FakeUpdates()
        self.watch = FakeWatch()
        self.profile = FakeProfile()
        self.max_chunk_bytes = MAX_CHUNK_BYTES
        self.model_info = control_pb2.GetModelInfoResponse(
            weights=STEP_1,
            tokenizer=control_pb2.TokenizerInfo(
                special_tokens={"eos_token": "</s>"}, chat_template="{{ x }}", tokenizer_class="Toy"
            ),
        )
        """Merged over what GetModelInfo answers."""
        self.vocabulary: dict[int, control_pb2.GetVocabularyResponse] = {
            0: control_pb2.GetVocabularyResponse(
                tokens=[b"<s>", b"\xe2\x82", b"\xac"], special_token_ids=[0], vocab_size=3, is_exact=True
            )
        }
        """The pages of the vocabulary, by their first token."""
        self.health = _Health(self)
        self.addr = ""

    def _note(self, request: Any, context: Any) -> None:
        self.calls.append(request)
        self.asked.set()
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining.append(context.time_remaining())
        if self.failures:
            self._fail(self.failures.pop(0), context)
        if self.failing_calls is None or len(self.calls) in self.failing_calls:
            self._fail(self.failure, context)

    def _fail(self, failure: Failure | None, context: Any) -> None:
        if failure is not None:
            context.set_trailing_metadata(failure.trailing_metadata())
            context.abort(failure.code, failure.message)

    def Generate(self, request, context):
        self._note(request, context)
        if self.hold_after is not None:
            self.cancelled.wait(60)
        return self.answer(request)

    def Stream(self, request, context):
        self._note(request, context)
        finished = False
        context.add_callback(lambda: None if finished else self.cancelled.set())
        for number, reply in enumerate(self.next_replies(request)):
            if number == self.hold_after:
                self.cancelled.wait(60)
                return
            yield reply
        self._fail(self.stream_failure, context)
        finished = True

    def Embed(self, request, context):
        self._note(request, context)
        return self.embeddings

    def Score(self, request, context):
        self._note(request, context)
        return self.scores

    def Rerank(self, request, context):
        self._note(request, context)
        return self.ranking

    def Classify(self, request, context):
        self._note(request, context)
        return self.classes

    def Abort(self, request, context):
        self._note(request, context)
        outcomes = [("a", 1), ("b", 2), ("c", 3), ("d", 0)]
        return inference_pb2.AbortResponse(
            results=[
                inference_pb2.AbortResult(request_id=name, outcome=outcome)  # type: ignore[arg-type]
                for name, outcome in outcomes
            ]
        )

    def UpdateWeights(self, request_iterator, context):
        self._note(None, context)
        return self.updates.handle(request_iterator, context)

    def CommitWeights(self, request, context):
        self._note(request, context)
        return control_pb2.CommitWeightsResponse(
            current=STEP_1,
            previous=BEFORE,
            outcome=weights_pb2.UPDATE_OUTCOME_COMMITTED,
            paused_for=Duration(nanos=250_000_000),
            in_flight=weights_pb2.InFlightReport(kept=3),
            digest=b"\x01\x02",
        )

    def DiscardWeights(self, request, context):
        self._note(request, context)
        return control_pb2.DiscardWeightsResponse(discarded=request.update_id == "staged")

    def Pause(self, request, context):
        self._note(request, context)
        return control_pb2.PauseResponse(in_flight=weights_pb2.InFlightReport(aborted=2), freed_bytes=4096)

    def Resume(self, request, context):
        self._note(request, context)
        return control_pb2.ResumeResponse()

    def FlushCache(self, request, context):
        self._note(request, context)
        return control_pb2.FlushCacheResponse(pages_freed=12, pages_in_use=3)

    def SetTracing(self, request, context):
        self._note(request, context)
        return telemetry_pb2.SetTracingResponse(
            previous=telemetry_pb2.TRACE_LEVEL_STEPS,
            current=request.level or telemetry_pb2.TRACE_LEVEL_STEPS,
            spans_exported=12,
            spans_dropped=3,
            spans_failed=4,
        )

    def GetModelInfo(self, request, context):
        self._note(request, context)
        reply = control_pb2.GetModelInfoResponse(
            model=self.name,
            architecture="ToyForCausalLM",
            vocab_size=10,
            max_context_tokens=64,
            eos_token_ids=[2, 3],
            default_sampling=self.default_sampling,
            weights=STEP_1,
            features=[control_pb2.FEATURE_CHAT, 42],  # type: ignore[list-item]  # 42: of a newer contract
        )
        reply.MergeFrom(self.model_info)
        return reply

    def GetServerInfo(self, request, context):
        self._note(request, context)
        return control_pb2.GetServerInfoResponse(
            server_version="9.8.7",
            instance_id="i-1",
            contract_revision=1,
            max_running_requests=4,
            max_queued_requests=8,
            kv_page_tokens=16,
            kv_pages_total=100,
            max_chunk_bytes=self.max_chunk_bytes,
            max_logprobs=5,
            devices=["cpu:0"],
            max_request_bytes=8 << 20,
            proposer="lookup",
            max_proposed_tokens=4,
            max_adapters=4,
            max_cached_adapters=64,
            max_adapter_rank=16,
            adapter_experts=True,
        )

    def GetLoad(self, request, context):
        self._note(request, context)
        return control_pb2.GetLoadResponse(
            running_requests=1,
            queued_requests=2,
            queued_prompt_tokens=30,
            kv_pages_used=7,
            kv_pages_total=100,
            paused=self.paused,
            weights=STEP_1,
            loaded_adapters=3,
        )

    def WatchLoad(self, request, context):
        self._note(request, context)
        yield from self.watch.handle(request, context, self._fail)

    def Profile(self, request, context):
        self._note(request, context)
        yield from self.profile.handle(request)

    def Tokenize(self, request, context):
        self._note(request, context)
        return control_pb2.TokenizeResponse(token_ids=[4, 5], max_context_tokens=64)

    def Detokenize(self, request, context):
        self._note(request, context)
        return control_pb2.DetokenizeResponse(text="Hello")

    def GetVocabulary(self, request, context):
        self._note(request, context)
        return self.vocabulary[request.first_token_id]

    def set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self.health.set(HEALTH_NAME, status.SERVING if serving else status.NOT_SERVING)


@contextlib.contextmanager
def running(address: str = "127.0.0.1:0") -> Iterator[FakeServer]:
    """Run a fake server on a free port or on a Unix socket."""
    fake = FakeServer()  # type: ignore[abstract]  # RPCs of adapters have a fake of their own
    fake.set_health(True)
    server = grpc.server(ThreadPoolExecutor(16))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
    control_pb2_grpc.add_ControlServiceServicer_to_server(fake, server)
    health_pb2_grpc.add_HealthServicer_to_server(fake.health, server)
    port = server.add_insecure_port(address)
    fake.addr = address if address.startswith("unix:") else f"127.0.0.1:{port}"
    server.start()
    try:
        yield fake
    finally:
        fake.cancelled.set()
        fake.watch.over.set()
        fake.updates.go_on.set()
        server.stop(None).wait()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as fake:
        yield fake


@pytest.fixture
def second_server() -> Iterator[FakeServer]:
    with running() as fake:
        yield fake


@pytest.fixture
def unix_server(tmp_path: Path) -> Iterator[FakeServer]:
    with running(f"unix:{tmp_path}/p.sock") as fake:
        yield fake


@pytest.fixture
def failure() -> type[Failure]:
    return Failure


@pytest.fixture
def expected() -> Generation:
    return EXPECTED
