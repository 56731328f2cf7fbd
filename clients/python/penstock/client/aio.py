"""The asyncio client: the sync one, method for method, over grpc.aio."""

# ruff: noqa: ASYNC109 - `timeout` is the deadline of the RPC, which the server is told and keeps

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio
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
from penstock.client.streams import AsyncGenerationStream, cancelled_call, is_task_cancelled
from penstock.client.values import Generation
from penstock.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")


class AsyncClient:
    """A connection to one server for one event loop: make it inside a coroutine.

    Arguments, methods and errors are those of `Client`; `stream` is not awaited, its events are.
    """

    def __init__(
        self,
        addr: str | None = None,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        channel: grpc.aio.Channel | None = None,
        metadata: Metadata | None = None,
        options: ChannelOptions = (),
    ) -> None:
        target = check_target(addr, channel, credentials)
        self._owns_channel = channel is None
        if channel is None:
            merged = channel_options(options)
            if credentials is None:
                channel = grpc.aio.insecure_channel(target, options=merged)
            else:
                channel = grpc.aio.secure_channel(target, credentials, options=merged)
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.control = control_pb2_grpc.ControlServiceStub(channel)
        stub = health_pb2_grpc.HealthStub(channel)
        self._check_health = stub.Check  # type: ignore[attr-defined]  # types-grpcio-health-checking lacks it
        self._metadata = pairs(metadata)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Run a prompt to its end. Options: see RequestOptions. Not idempotent: a retry generates again."""
        request = requests.fill_request(inference_pb2.GenerateRequest(), prompt, options)
        return replies.generation(await self._unary(self.inference.Generate, request, timeout, metadata))

    def stream(
        self,
        prompt: str | None = None,
        *,
        min_tokens_per_message: int | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerationStream:
        """The same, as events while tokens are made. Use it in an `async with` block, or close it."""
        request = requests.stream_request(prompt, min_tokens_per_message, options)
        call = self.inference.Stream(request, timeout=timeout, metadata=pairs(self._metadata, metadata))
        return AsyncGenerationStream(call)

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
        """End requests early; answers once their slots and KV pages are free. Give exactly one target."""
        request = control_requests.abort_request(ids, prefix, all, reason)
        return replies.abort_results(await self._unary(self.inference.Abort, request, timeout, metadata))

    async def model_info(
        self, *, include_tensors: bool = False, timeout: float | None = None, metadata: Metadata | None = None
    ) -> ModelInfo:
        """The model served and the sampling values in force."""
        request = control_pb2.GetModelInfoRequest(include_tensors=include_tensors)
        return replies.model_info(await self._unary(self.control.GetModelInfo, request, timeout, metadata))

    async def server_info(
        self, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> ServerInfo:
        """The server's limits."""
        request = control_pb2.GetServerInfoRequest()
        return replies.server_info(await self._unary(self.control.GetServerInfo, request, timeout, metadata))

    async def load(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> Load:
        """How busy the server is now."""
        return replies.load(
            await self._unary(self.control.GetLoad, control_pb2.GetLoadRequest(), timeout, metadata)
        )

    async def flush_cache(
        self, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> FlushedCache:
        """Forget the prompt prefixes that the server cached; running requests keep their pages."""
        request = control_pb2.FlushCacheRequest()
        return replies.flushed_cache(await self._unary(self.control.FlushCache, request, timeout, metadata))

    async def tokenize(
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
        return replies.tokens(await self._unary(self.control.Tokenize, request, timeout, metadata))

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> str:
        """Text of token ids."""
        request = control_requests.detokenize_request(token_ids, skip_special_tokens)
        return (await self._unary(self.control.Detokenize, request, timeout, metadata)).text

    async def is_ready(self, timeout: float = 1.0) -> bool:
        """Whether health is SERVING now; False also when nobody answers within `timeout` seconds."""
        request = health_pb2.HealthCheckRequest(service=SERVING_SERVICE)
        try:
            reply = await self._check_health(
                request, timeout=timeout, metadata=self._metadata, wait_for_ready=True
            )
        except grpc.RpcError as error:
            if is_final_health_error(error):
                raise from_rpc_error(error) from error
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Return once the server's health is SERVING; NotReady after `timeout` seconds (None: waits on)."""
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while not await self.is_ready(
            1.0 if deadline is None else min(1.0, deadline - asyncio.get_running_loop().time())
        ):
            if deadline is not None and asyncio.get_running_loop().time() >= deadline:
                raise NotReady.local(f"the server was not ready within {timeout:g} s")
            await asyncio.sleep(0.05)

    async def _unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ReplyT],
        request: RequestT,
        timeout: float | None,
        metadata: Metadata | None,
    ) -> ReplyT:
        call = method(request, timeout=timeout, metadata=pairs(self._metadata, metadata))
        try:
            return await call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            raise await cancelled_call(call) from None

    async def close(self) -> None:
        """Close the channel, unless it was the caller's; running calls are cancelled."""
        if self._owns_channel:
            await self.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
