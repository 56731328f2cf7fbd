"""A server on a loopback port with stubs to it, and how to read its errors."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no hints
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.service.access.rates import Clock
from penstock.service.backend import Backend
from penstock.service.group.leader import GroupLeader
from penstock.service.lifecycle import underway
from penstock.service.options import ServerOptions
from penstock.service.server import PenstockServer
from penstock.service.servicers.serving import Serving
from penstock.service.telemetry.metrics.push import Collector
from penstock.service.telemetry.otlp.tracing import Tracing
from penstock.service.usage.meter import UsageSink
from penstock.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2, weights_pb2
from tests.front_processes import FRONT_PROCESSES
from tests.service.codecs import byte_codec
from tests.service.fake import FakeEngine

WAIT_S = 60.0
"""What a call or a condition may take. Beside 20 busy processes, what takes 2 s alone has taken 20."""
TRACED_GRACE_S = 20.0
NO_MOMENT_S = 0.001
"""A server that stops waits 30 ms for requests that gRPC has not handed over. A rig at its end gets none."""
CODEC = byte_codec()


@dataclass
class Rig:
    """Everything that a test needs of a server."""

    engine: Any
    server: PenstockServer
    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.control: Any = control_pb2_grpc.ControlServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    @property
    def serving(self) -> Serving:
        """What the server's RPCs share."""
        assert self.server.serving is not None, "a rig has an engine"
        return self.server.serving

    async def health_of(self, service: str = "") -> int:
        reply = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        status: int = reply.status
        return status

    async def raw(self, method: str, data: bytes) -> bytes:
        """Call a unary method with these bytes as its message."""
        call: Any = self.channel.unary_unary(f"/penstock.v1.{method}")
        reply: bytes = await call(data)
        return reply


class Kept:
    """An engine that servers of several tests share. Servers neither start nor end it."""

    def __init__(self, engine: Backend) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def start(self) -> None:
        pass

    def drain(self, timeout_s: float) -> bool:
        return True

    def shutdown(self) -> None:
        self._engine.abort(all_requests=True)


@contextlib.asynccontextmanager
async def serving(
    engine: Backend | None = None,
    *,
    start: bool = True,
    tracing: Tracing | None = None,
    collector: Collector | None = None,
    channel_options: Sequence[tuple[str, Any]] = (),
    usage: UsageSink | None = None,
    rates_clock: Clock = time.monotonic,
    group: GroupLeader | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    """Run a server on `engine` (by default a free-running fake one).

    At its stop, requests that still run are aborted at once. One that is traced waits for them, because the
    last spans have what is left of the grace: without any they would be lost on a busy machine.
    """
    engine = engine or FakeEngine(codec=CODEC)
    fronts = FRONT_PROCESSES if options.get("port", 0) is not None and group is None else 0
    grace_s = 0.0 if tracing is None else TRACED_GRACE_S
    server = PenstockServer(
        ServerOptions(**({"port": 0, "grace_s": grace_s, "front_processes": fronts} | options)),
        tracing,
        collector=collector,
        usage=usage,
        rates_clock=rates_clock,
        group=group,
    )
    await server.start()
    server.attach(engine)
    if start:
        await server.start_engine()
    async with grpc.aio.insecure_channel(server.address, options=list(channel_options)) as channel:
        try:
            yield Rig(engine, server, channel)
        finally:
            with mock.patch.object(underway, "_MOMENT_S", NO_MOMENT_S):
                await server.stop()


def fake(**options: Any) -> FakeEngine:
    """Make a fake engine with the byte tokenizer."""
    return FakeEngine(**({"codec": CODEC} | options))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does, for a bounded time."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 -- what is watched has no event
            await asyncio.sleep(0.005)


@dataclass
class Failure:
    """A non-OK status, taken apart."""

    code: grpc.StatusCode
    message: str
    info: Any
    details: list[Any]

    @property
    def reason(self) -> str:
        return str(self.info.reason)

    @property
    def violations(self) -> dict[str, str]:
        """From field to description, as in the BadRequest."""
        (bad,) = [d for d in self.details if isinstance(d, error_details_pb2.BadRequest)]
        return {v.field: v.description for v in bad.field_violations}

    @property
    def tensors(self) -> dict[str, str]:
        """From the name of each bad tensor to what is wrong with it, as in the TensorErrors."""
        (found,) = [d for d in self.details if isinstance(d, weights_pb2.TensorErrors)]
        reasons = weights_pb2.TensorErrorReason
        return {e.name: reasons.Name(e.reason).removeprefix("TENSOR_ERROR_REASON_") for e in found.errors}

    @property
    def request_id(self) -> str:
        """The id in RequestInfo, which every failure has."""
        (request,) = [d for d in self.details if isinstance(d, error_details_pb2.RequestInfo)]
        return str(request.request_id)

    @property
    def retry_after_s(self) -> float | None:
        """The delay in RetryInfo; None without one."""
        found = [d for d in self.details if isinstance(d, error_details_pb2.RetryInfo)]
        return found[0].retry_delay.ToNanoseconds() / 1e9 if found else None


_DETAILS = {
    cls.DESCRIPTOR.full_name: cls
    for cls in (
        error_details_pb2.ErrorInfo,
        error_details_pb2.BadRequest,
        error_details_pb2.RetryInfo,
        error_details_pb2.RequestInfo,
        weights_pb2.TensorErrors,
    )
}


def taken_apart(error: grpc.aio.AioRpcError) -> Failure:
    status = status_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status.ParseFromString(value)
    details = []
    for packed in status.details:
        detail = _DETAILS[packed.TypeName()]()
        packed.Unpack(detail)
        details.append(detail)
    infos = [d for d in details if isinstance(d, error_details_pb2.ErrorInfo)]
    if infos:
        assert infos[0].domain == "penstock"
        assert status.code == error.code().value[0]
    return Failure(error.code(), error.details() or "", infos[0] if infos else None, details)


async def failure_of(call: Awaitable[Any]) -> Failure:
    """Return the failure of a call, which must fail."""
    try:
        async with asyncio.timeout(WAIT_S):
            reply = await call
    except grpc.aio.AioRpcError as error:
        return taken_apart(error)
    raise AssertionError(f"the call succeeded: {reply}")


async def read_all(call: Any) -> AsyncIterator[inference_pb2.StreamResponse]:
    """Yield the rest of a stream that was begun with read(). Raises its failure."""
    async with asyncio.timeout(3 * WAIT_S):
        while (message := await call.read()) is not grpc.aio.EOF:
            yield message


async def collect(call: Any) -> list[inference_pb2.StreamResponse]:
    """All messages of a stream. It must follow the grammar and end with OK: started; for each index deltas
    and then finished; summary.
    """
    messages = []
    async with asyncio.timeout(WAIT_S):
        async for message in call:
            messages.append(message)  # noqa: PERF401 -- kept when the stream fails
    kinds = [m.WhichOneof("event") for m in messages]
    assert (kinds[0], kinds[-1]) == ("started", "summary")
    assert not {"started", "summary"} & set(kinds[1:-1])
    ended: set[int] = set()
    seen: set[int] = set()
    for message, kind in zip(messages[1:-1], kinds[1:-1], strict=True):
        index = message.delta.index if kind == "delta" else message.finished.index
        assert index not in ended, "nothing comes after finished"
        seen.add(index)
        if kind == "finished":
            ended.add(index)
    assert ended == seen == set(range(len(ended)))
    assert await call.code() is grpc.StatusCode.OK
    return messages


def joined(messages: Sequence[inference_pb2.StreamResponse]) -> inference_pb2.GenerateResponse:
    """Return what Generate would have answered, computed from the messages of a stream."""
    started, summary = messages[0].started, messages[-1].summary
    ends = {m.finished.index: m.finished.finish for m in messages if m.HasField("finished")}
    outputs = [inference_pb2.Output(index=i, finish=finish) for i, finish in sorted(ends.items())]
    num_tokens = [0] * len(outputs)
    for output in outputs:
        output.weights.add(first_output_token=0, version=started.weights)
    for delta in (m.delta for m in messages if m.HasField("delta")):
        output = outputs[delta.index]
        if delta.HasField("weights"):
            output.weights.add(first_output_token=num_tokens[delta.index], version=delta.weights)
        num_tokens[delta.index] += len(delta.token_ids)
        output.text += delta.text
        output.reasoning += delta.reasoning
        output.token_ids.extend(delta.token_ids)
        output.tool_calls.extend(delta.tool_calls)
        if delta.HasField("logprobs"):
            output.logprobs.MergeFrom(delta.logprobs)
    return inference_pb2.GenerateResponse(
        request_id=started.request_id,
        model=started.model,
        prompt=started.prompt,
        outputs=outputs,
        usage=summary.usage,
        timing=summary.timing,
    )


def generate(prompt: str | None = None, **fields: Any) -> inference_pb2.GenerateRequest:
    """Make a GenerateRequest; stopping, sampling and output may be dicts."""
    return inference_pb2.GenerateRequest(**_fields(prompt, fields))


def stream(prompt: str | None = None, **fields: Any) -> inference_pb2.StreamRequest:
    return inference_pb2.StreamRequest(**_fields(prompt, fields))


def _fields(prompt: str | None, fields: dict[str, Any]) -> dict[str, Any]:
    types = {
        "sampling": types_pb2.SamplingParams,
        "stopping": types_pb2.StoppingParams,
        "output": types_pb2.OutputOptions,
        "cache": types_pb2.CacheOptions,
        "context": types_pb2.ContextOptions,
        "chat": types_pb2.ChatPrompt,
        "constraint": types_pb2.Constraint,
    }
    made = {k: types[k](**v) if k in types and isinstance(v, dict) else v for k, v in fields.items()}
    return made if prompt is None else {"prompt": prompt, **made}


def ids(text: str) -> list[int]:
    """Token ids of the byte tokenizer."""
    return list(text.encode())
