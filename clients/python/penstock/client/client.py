"""The sync client: each method builds a request (requests.py), calls, and reads the reply (replies.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.client import control_requests, replies, requests
from penstock.client.calls import (
    SERVING_SERVICE,
    ChannelOptions,
    Metadata,
    channel_options,
    check_target,
    is_final_health_error,
    pairs,
)
from penstock.client.errors import NotReady, from_rpc_error
from penstock.client.options import ChatOptions, RequestOptions
from penstock.client.server_values import AbortResult, FlushedCache, Load, ModelInfo, ServerInfo, Tokens
from penstock.client.streams import GenerationStream
from penstock.client.values import Generation
from penstock.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")


class Client:
    """A connection to one server, safe to share between threads.

    `addr` is host:port, by default 127.0.0.1:50051; `credentials` (`grpc.ssl_channel_credentials(...)`) make
    the channel secure. With an existing `channel` give neither: it stays the caller's, and `close` leaves it
    open. `metadata` goes with every call, before the call's own. `inference` and `control` are the generated
    stubs, for the RPCs that have no method here.

    Every method takes `timeout`, the hard deadline in seconds (None: no limit), and `metadata` of the call,
    e.g. `{"traceparent": "00-..."}`; it raises the errors of `penstock.client.errors`.
    """

    def __init__(
        self,
        addr: str | None = None,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        channel: grpc.Channel | None = None,
        metadata: Metadata | None = None,
        options: ChannelOptions = (),
    ) -> None:
        target = check_target(addr, channel, credentials)
        self._owns_channel = channel is None
        if channel is None:
            merged = channel_options(options)
            if credentials is None:
                channel = grpc.insecure_channel(target, options=merged)
            else:
                channel = grpc.secure_channel(target, credentials, options=merged)
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.control = control_pb2_grpc.ControlServiceStub(channel)
        stub = health_pb2_grpc.HealthStub(channel)
        self._check_health = stub.Check  # type: ignore[attr-defined]  # types-grpcio-health-checking lacks it
        self._metadata = pairs(metadata)

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Run a prompt to its end. Options: see RequestOptions. Not idempotent: a retry generates again."""
        request = requests.fill_request(inference_pb2.GenerateRequest(), prompt, options)
        return replies.generation(self._unary(self.inference.Generate, request, timeout, metadata))

    def stream(
        self,
        prompt: str | None = None,
        *,
        min_tokens_per_message: int | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationStream:
        """The same, as events while tokens are made. Use it in a `with` block, or close it."""
        request = requests.stream_request(prompt, min_tokens_per_message, options)
        call = self.inference.Stream(request, timeout=timeout, metadata=pairs(self._metadata, metadata))
        return GenerationStream(call)

    def abort(
        self,
        ids: str | Sequence[str] | None = None,
        *,
        prefix: str | None = None,
        all: bool = False,
        reason: str = "",
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> tuple[AbortResult, ...]:
        """End requests early; answers once their slots and KV pages are free. Give exactly one target."""
        request = control_requests.abort_request(ids, prefix, all, reason)
        return replies.abort_results(self._unary(self.inference.Abort, request, timeout, metadata))

    def model_info(
        self, *, include_tensors: bool = False, timeout: float | None = None, metadata: Metadata | None = None
    ) -> ModelInfo:
        """The model served and the sampling values in force."""
        request = control_pb2.GetModelInfoRequest(include_tensors=include_tensors)
        return replies.model_info(self._unary(self.control.GetModelInfo, request, timeout, metadata))

    def server_info(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> ServerInfo:
        """The server's limits."""
        request = control_pb2.GetServerInfoRequest()
        return replies.server_info(self._unary(self.control.GetServerInfo, request, timeout, metadata))

    def load(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> Load:
        """How busy the server is now."""
        return replies.load(
            self._unary(self.control.GetLoad, control_pb2.GetLoadRequest(), timeout, metadata)
        )

    def flush_cache(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> FlushedCache:
        """Forget the prompt prefixes that the server cached; running requests keep their pages."""
        request = control_pb2.FlushCacheRequest()
        return replies.flushed_cache(self._unary(self.control.FlushCache, request, timeout, metadata))

    def tokenize(
        self,
        text: str | None = None,
        *,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **chat: Unpack[ChatOptions],
    ) -> Tokens:
        """Token ids of a text, or of a conversation (messages=...) rendered with the chat template."""
        request = control_requests.tokenize_request(text, add_special_tokens, chat)
        return replies.tokens(self._unary(self.control.Tokenize, request, timeout, metadata))

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> str:
        """Text of token ids."""
        request = control_requests.detokenize_request(token_ids, skip_special_tokens)
        return self._unary(self.control.Detokenize, request, timeout, metadata).text

    def is_ready(self, timeout: float = 1.0) -> bool:
        """Whether health is SERVING now; False also when nobody answers within `timeout` seconds."""
        request = health_pb2.HealthCheckRequest(service=SERVING_SERVICE)
        try:
            reply = self._check_health(request, timeout=timeout, metadata=self._metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            if is_final_health_error(error):
                raise from_rpc_error(error) from error
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Return once the server's health is SERVING; NotReady after `timeout` seconds (None: waits on)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_ready(1.0 if deadline is None else min(1.0, deadline - time.monotonic())):
            if deadline is not None and time.monotonic() >= deadline:
                raise NotReady.local(f"the server was not ready within {timeout:g} s")
            time.sleep(0.05)

    def _unary(
        self,
        method: grpc.UnaryUnaryMultiCallable[RequestT, ReplyT],
        request: RequestT,
        timeout: float | None,
        metadata: Metadata | None,
    ) -> ReplyT:
        try:
            return method(request, timeout=timeout, metadata=pairs(self._metadata, metadata))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def close(self) -> None:
        """Close the channel, unless it was the caller's; running calls are cancelled."""
        if self._owns_channel:
            self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
