"""The asyncio client. It has the methods of the sync client, over grpc.aio."""

# ruff: noqa: ASYNC109 - `timeout` is the deadline of the RPC, which gRPC also sends to the server

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio
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
from penstock.client.replies.streams import (
    AsyncCall,
    AsyncGenerationStream,
    cancelled_call,
    is_task_cancelled,
)
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


class AsyncClient(BaseClient[grpc.aio.Channel]):
    """A connection to one server, or to several that serve the same, for one event loop. Make it inside a
    coroutine.

    Arguments, methods and errors are those of `Client`. `stream` itself is not awaited; its events are.
    """

    inference: inference_pb2_grpc.InferenceServiceAsyncStub
    control: control_pb2_grpc.ControlServiceAsyncStub

    @staticmethod
    def _open(found: Endpoint) -> grpc.aio.Channel:
        if found.credentials is None:
            return grpc.aio.insecure_channel(found.target, options=found.options)
        return grpc.aio.secure_channel(found.target, found.credentials, options=found.options)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Run a prompt to its end and return all outputs. For options see `RequestOptions`.

        It is not idempotent: calling it again generates again.
        """
        request = generation_requests.fill_request(inference_pb2.GenerateRequest(), prompt, options)
        return messages.generation(
            await self._unary(self.inference.Generate, request, timeout, metadata, None)
        )

    def stream(
        self,
        prompt: str | None = None,
        *,
        min_tokens_per_message: int | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerationStream:
        """Run a prompt and return its events while tokens are generated. For options see `RequestOptions`.

        `min_tokens_per_message` is the least number of tokens in a delta (default 1); higher values make
        fewer and larger messages. Use the stream in an `async with` block, or close it.
        """
        request = generation_requests.stream_request(prompt, min_tokens_per_message, options)
        sent = pairs(self.metadata, metadata)

        def start(left: float | None) -> AsyncCall:
            return self.inference.Stream(request, timeout=left, metadata=sent)

        return AsyncGenerationStream(start, Attempts(self._retries, self._timeouts.of(timeout)))

    async def abort(
        self,
        ids: str | Sequence[str] | None = None,
        *,
        prefix: str | None = None,
        all: bool = False,
        reason: str = "",
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> tuple[AbortResult, ...]:
        """End requests early, and return what happened to each. Give exactly one of `ids`, `prefix` (of ids)
        and `all=True`; otherwise TypeError or ValueError.

        Returns once their slots and KV pages are free. An unknown id is an outcome, not an error. `reason` is
        sent to whoever waits for the aborted requests.
        """
        request = control_requests.abort_request(ids, prefix, all, reason)
        return messages.abort_results(await self._unary(self.inference.Abort, request, timeout, metadata))

    async def model_info(
        self, *, include_tensors: bool = False, timeout: float | None = None, metadata: Metadata | None = None
    ) -> ModelInfo:
        """Return the served model and the sampling values in force. `include_tensors` adds name, dtype and
        shape of every tensor.
        """
        request = control_pb2.GetModelInfoRequest(include_tensors=include_tensors)
        return messages.model_info(await self._unary(self.control.GetModelInfo, request, timeout, metadata))

    async def server_info(
        self, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> ServerInfo:
        """Return the server's limits, which are fixed at its start."""
        request = control_pb2.GetServerInfoRequest()
        return messages.server_info(await self._unary(self.control.GetServerInfo, request, timeout, metadata))

    async def load(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> Load:
        """Return how busy the server is now."""
        return messages.load(
            await self._unary(self.control.GetLoad, control_pb2.GetLoadRequest(), timeout, metadata)
        )

    async def flush_cache(
        self, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> FlushedCache:
        """Forget all cached prompt prefixes. Running requests keep their pages, which are not shared with new
        requests.
        """
        request = control_pb2.FlushCacheRequest()
        return messages.flushed_cache(await self._unary(self.control.FlushCache, request, timeout, metadata))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **chat: Unpack[ChatOptions],
    ) -> Tokens:
        """Return the token ids of a text, or of a conversation (`messages=...`) rendered with the chat
        template.

        `add_special_tokens` is true by default for a text, and false for a conversation, whose template
        writes them. Give exactly one of `text` and `messages`; otherwise TypeError.
        """
        request = control_requests.tokenize_request(text, add_special_tokens, chat)
        return messages.tokens(
            await self._unary(self.control.Tokenize, request, timeout, metadata, TEXT_TIMEOUT)
        )

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> str:
        """Return the text of token ids. Special tokens are left out unless `skip_special_tokens` is false."""
        request = control_requests.detokenize_request(token_ids, skip_special_tokens)
        return (await self._unary(self.control.Detokenize, request, timeout, metadata, TEXT_TIMEOUT)).text

    async def is_ready(self, timeout: float = 1.0) -> bool:
        """Whether the server's health is SERVING now. Also false if nobody answers within
        `timeout` seconds.
        """
        return await self._why_not_ready(timeout) is None

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the server's health is SERVING. Raises NotReady after `timeout` seconds; None waits for
        ever.
        """
        now = asyncio.get_running_loop().time
        deadline = math.inf if timeout is None else now() + timeout
        why: str | None = NOBODY_ANSWERED
        while (found := await self._why_not_ready(min(1.0, deadline - now()))) is not None:
            why = why if found == NOBODY_ANSWERED else found
            if now() >= deadline:
                # a call that does not wait for a connection reports why there is none
                if why == NOBODY_ANSWERED:
                    why = await self._why_not_ready(0.5, wait=False)
                if why is None:
                    return
                raise NotReady.local(f"the server was not ready within {timeout:g} s: {why}")
            await asyncio.sleep(0.05)

    async def _why_not_ready(self, timeout: float, wait: bool = True) -> str | None:
        request = health_pb2.HealthCheckRequest(service=SERVING_SERVICE)
        try:
            reply = await self._check_health(
                request, timeout=timeout, metadata=self.metadata, wait_for_ready=wait
            )
        except grpc.RpcError as error:
            why = why_no_health(error)
            if why is None:
                raise from_rpc_error(error) from error
            return why
        return why_not_ready(reply)

    async def _unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ReplyT],
        request: RequestT,
        timeout: float | None,
        metadata: Metadata | None,
        otherwise: float | None = INFO_TIMEOUT,
    ) -> ReplyT:
        attempts = Attempts(self._retries, self._timeouts.of(timeout, otherwise))
        sent = pairs(self.metadata, metadata)
        while True:
            call = method(request, timeout=attempts.timeout(), metadata=sent)
            try:
                return await call
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                delay = attempts.delay_after(failure)
                if delay is None:
                    raise failure from error
            except asyncio.CancelledError:
                if is_task_cancelled():
                    raise
                raise await cancelled_call(call) from None
            await asyncio.sleep(delay)

    async def close(self) -> None:
        """Close the channel and cancel running calls. A channel that the caller gave stays open."""
        if self._owns_channel:
            await self.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
