"""The sync client: each method builds a request (requests/), calls, and reads the reply (replies/)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2

from penstock.client.base import BaseClient
from penstock.client.connection.channel import (
    NOBODY_ANSWERED,
    SERVING_SERVICE,
    Metadata,
    pairs,
    why_no_health,
    why_not_ready,
)
from penstock.client.connection.endpoint import Endpoint
from penstock.client.connection.retries import Attempts
from penstock.client.connection.timeouts import INFO_TIMEOUT, TEXT_TIMEOUT
from penstock.client.errors import NotReady, from_rpc_error
from penstock.client.replies import messages
from penstock.client.replies.streams import GenerationStream
from penstock.client.requests import control_requests, generation_requests
from penstock.client.requests.options import ChatOptions, RequestOptions
from penstock.client.values.results import Generation
from penstock.client.values.server_values import (
    AbortResult,
    FlushedCache,
    Load,
    ModelInfo,
    ServerInfo,
    Tokens,
)
from penstock.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")


class Client(BaseClient[grpc.Channel]):
    """A connection to one server, or to several that serve the same, safe to share between threads.

    `addr` is host:port, by default 127.0.0.1:50051, or unix:/path. Of several servers, "a:50051,b:50051" or
    dns:///name:50051, those whose health is SERVING are asked in turns.

    `tls` (True, or `Tls` with files) secures the channel, or `credentials` of gRPC's own do; `token` is the
    key that the server asks for. A token is not sent in plaintext to another machine unless `insecure` says
    that it may be. With an existing `channel` give none of these: it stays the caller's, and `close` leaves
    it open.

    `metadata` goes with every call, before the call's own. `inference` and `control` are the generated stubs,
    for the RPCs that have no method here; they need `metadata=client.metadata` where the server wants a key.

    Every method takes `timeout`, the hard deadline in seconds for all of its attempts (math.inf: no limit),
    and `metadata` of the call, e.g. `{"traceparent": "00-..."}`; it raises the errors of
    `penstock.client.errors`. Where a call has no `timeout`, the client's counts; without either, generation
    has no limit, tokenizing has 60 s and everything else 10 s. `retries` says how often a call that the
    server could not take is tried again; by default it is not.
    """

    inference: inference_pb2_grpc.InferenceServiceStub
    control: control_pb2_grpc.ControlServiceStub

    @staticmethod
    def _open(found: Endpoint) -> grpc.Channel:
        if found.credentials is None:
            return grpc.insecure_channel(found.target, options=found.options)
        return grpc.secure_channel(found.target, found.credentials, options=found.options)

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Run a prompt to its end. Options: see RequestOptions. Not idempotent: a retry generates again."""
        request = generation_requests.fill_request(inference_pb2.GenerateRequest(), prompt, options)
        return messages.generation(self._unary(self.inference.Generate, request, timeout, metadata, None))

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
        request = generation_requests.stream_request(prompt, min_tokens_per_message, options)
        sent = pairs(self.metadata, metadata)
        return GenerationStream(
            lambda left: self.inference.Stream(request, timeout=left, metadata=sent),
            Attempts(self._retries, self._timeouts.of(timeout)),
        )

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
        return messages.abort_results(self._unary(self.inference.Abort, request, timeout, metadata))

    def model_info(
        self, *, include_tensors: bool = False, timeout: float | None = None, metadata: Metadata | None = None
    ) -> ModelInfo:
        """The model served and the sampling values in force."""
        request = control_pb2.GetModelInfoRequest(include_tensors=include_tensors)
        return messages.model_info(self._unary(self.control.GetModelInfo, request, timeout, metadata))

    def server_info(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> ServerInfo:
        """The server's limits."""
        request = control_pb2.GetServerInfoRequest()
        return messages.server_info(self._unary(self.control.GetServerInfo, request, timeout, metadata))

    def load(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> Load:
        """How busy the server is now."""
        return messages.load(
            self._unary(self.control.GetLoad, control_pb2.GetLoadRequest(), timeout, metadata)
        )

    def flush_cache(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> FlushedCache:
        """Forget the prompt prefixes that the server cached; running requests keep their pages."""
        request = control_pb2.FlushCacheRequest()
        return messages.flushed_cache(self._unary(self.control.FlushCache, request, timeout, metadata))

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
        return messages.tokens(self._unary(self.control.Tokenize, request, timeout, metadata, TEXT_TIMEOUT))

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
        return self._unary(self.control.Detokenize, request, timeout, metadata, TEXT_TIMEOUT).text

    def is_ready(self, timeout: float = 1.0) -> bool:
        """Whether health is SERVING now; False also when nobody answers within `timeout` seconds."""
        return self._why_not_ready(timeout) is None

    def wait_ready(self, timeout: float | None = None) -> None:
        """Return once the server's health is SERVING; NotReady after `timeout` seconds (None: waits on)."""
        now = time.monotonic
        deadline = math.inf if timeout is None else now() + timeout
        why: str | None = NOBODY_ANSWERED
        while (found := self._why_not_ready(min(1.0, deadline - now()))) is not None:
            why = why if found == NOBODY_ANSWERED else found
            if now() >= deadline:
                if why == NOBODY_ANSWERED:  # a call that does not wait is told why nobody does
                    why = self._why_not_ready(0.5, wait=False)
                if why is None:
                    return
                raise NotReady.local(f"the server was not ready within {timeout:g} s: {why}")
            time.sleep(0.05)

    def _why_not_ready(self, timeout: float, wait: bool = True) -> str | None:
        request = health_pb2.HealthCheckRequest(service=SERVING_SERVICE)
        try:
            reply = self._check_health(request, timeout=timeout, metadata=self.metadata, wait_for_ready=wait)
        except grpc.RpcError as error:
            why = why_no_health(error)
            if why is None:
                raise from_rpc_error(error) from error
            return why
        return why_not_ready(reply)

    def _unary(
        self,
        method: grpc.UnaryUnaryMultiCallable[RequestT, ReplyT],
        request: RequestT,
        timeout: float | None,
        metadata: Metadata | None,
        otherwise: float | None = INFO_TIMEOUT,
    ) -> ReplyT:
        attempts = Attempts(self._retries, self._timeouts.of(timeout, otherwise))
        sent = pairs(self.metadata, metadata)
        while True:
            try:
                return method(request, timeout=attempts.timeout(), metadata=sent)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                delay = attempts.delay_after(failure)
                if delay is None:
                    raise failure from error
            time.sleep(delay)

    def close(self) -> None:
        """Close the channel, unless it was the caller's; running calls are cancelled."""
        if self._owns_channel:
            self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
