"""LoRA adapters: their values, requests and answers, and the methods of both clients."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from penstock.client.connection.channel import Metadata
from penstock.client.generation.checks import checked
from penstock.client.reading import AsyncReadings, Readings
from penstock.client.status import spelled
from penstock.client.weights.sending import async_send, send, start
from penstock.client.weights.tensors import Tensor, manifest_of, tensors_in, tensors_of
from penstock.client.weights.update import Progress, chunk_bytes_of, steps_of
from penstock.v1 import adapters_pb2, control_pb2

AdapterSource: TypeAlias = str | os.PathLike[str] | tuple[Mapping[str, Any], Mapping[str, Any]]
"""A directory that PEFT wrote, or what is in one: the values of adapter_config.json, and arrays by the names
that adapter_model.safetensors gives them.
"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of a server."""

    name: str
    """What `adapter` of a request is, to ask for it."""
    state: str
    """Where its weights are: "loading"; "cached" in host memory; "loaded" on the device."""
    rank: int
    """The largest rank of its matrices."""
    target_modules: tuple[str, ...]
    """The modules that it changes, such as "q_proj"."""
    size_bytes: int
    """The memory that its weights take."""
    digest: bytes
    """Made by SHA-256 of what it is made of, as the server has it in memory: two adapters of one server with
    the same digest answer alike.
    """
    last_used: datetime | None
    """When a request last named it, or when it was loaded (UTC)."""
    running_requests: int
    """How many outputs run on what it is made of, under this name or another. Those that wait are not
    counted.
    """
    pinned: bool
    """Whether it keeps its place on the device until it is unloaded."""
    source: str
    """What it was read from; empty for a caller without the role "control"."""


_STATES = {number: name for name, number in adapters_pb2.AdapterState.items()}


def adapter_of(message: adapters_pb2.Adapter) -> Adapter:
    return Adapter(
        name=message.name,
        state=spelled(_STATES, message.state, "ADAPTER_STATE_"),
        rank=message.rank,
        target_modules=tuple(message.target_modules),
        size_bytes=message.size_bytes,
        digest=message.digest,
        last_used=message.last_used.ToDatetime(UTC) if message.HasField("last_used") else None,
        running_requests=message.running_requests,
        pinned=message.pinned,
        source=message.source,
    )


def load_request(
    name: str, uri: str | None, *, pinned: bool, replace: bool
) -> adapters_pb2.LoadAdapterRequest:
    with checked("name"):
        request = adapters_pb2.LoadAdapterRequest(name=name, pinned=pinned, replace=replace)
    with checked("uri"):
        request.uri = uri or ""
    return request


@dataclass(frozen=True, slots=True)
class Push:
    """An adapter that is to be sent, maybe several times."""

    begin: adapters_pb2.PushAdapterBegin
    """`described` adds its manifest."""
    tensors: tuple[Tensor, ...]
    progress: bool | Progress

    @property
    def title(self) -> str:
        return "Sending adapter"

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def described(self) -> Push:
        """Return the push with its manifest, for whose checksums all bytes of the tensors are read."""
        begin = adapters_pb2.PushAdapterBegin()
        begin.CopyFrom(self.begin)
        begin.manifest.CopyFrom(manifest_of(self.tensors, checksums=True))
        return replace(self, begin=begin)

    def steps(self, chunk_bytes: int) -> Iterator[tuple[adapters_pb2.PushAdapterRequest, int]]:
        """Yield the messages of the stream, in order, each with how many bytes of tensors are in it."""
        yield adapters_pb2.PushAdapterRequest(begin=self.begin), 0
        yield from steps_of(self.tensors, chunk_bytes, adapters_pb2.PushAdapterRequest)
        commit = adapters_pb2.PushAdapterCommit(total_bytes=self.num_bytes)
        yield adapters_pb2.PushAdapterRequest(commit=commit), 0


def push_of(
    name: str, source: AdapterSource, *, pinned: bool, replace: bool, progress: bool | Progress
) -> Push:
    """Make a push of the arguments of `push_adapter`. Reads the config, and no tensor's bytes.

    Raises OSError for what cannot be read, ValueError for a file that is no complete safetensors file, and
    InvalidRequest for what cannot be sent.
    """
    if isinstance(source, tuple):
        config, arrays = source
        text, tensors = json.dumps(dict(config)), tensors_of(arrays)
    else:
        folder = Path(source)
        text = (folder / "adapter_config.json").read_text(encoding="utf-8")
        tensors = tensors_in(folder / "adapter_model.safetensors")
    with checked("begin"):
        begin = adapters_pb2.PushAdapterBegin(name=name, config_json=text, pinned=pinned, replace=replace)
    return Push(begin, tensors, progress)


_PUSH = "penstock.v1.ControlService/PushAdapter"


class Adapters(Readings):
    """Loads, lists and unloads adapters."""

    def list_adapters(
        self, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> tuple[Adapter, ...]:
        """Tell the adapters that the server has in memory and the caller may use, in the order of their
        names.
        """
        request = adapters_pb2.ListAdaptersRequest()
        reply = self._unary(self.control.ListAdapters, request, timeout, metadata)
        return tuple(map(adapter_of, reply.adapters))

    def load_adapter(
        self,
        name: str,
        *,
        uri: str | None = None,
        pinned: bool = False,
        replace: bool = False,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> Adapter:
        """Have the server read an adapter from its own disk: the directory `name` below its --adapter-dir, or
        the one that `uri` names, such as "file:///adapters/sql". `pinned` keeps its place on the device, and
        `replace` lets it take the place of another adapter of this name.

        There is no default `timeout`. Raises AdapterRefused, AdapterExists and TooManyAdapters.
        """
        self._check_one_server()
        request = load_request(name, uri, pinned=pinned, replace=replace)
        reply = self._unary(self.control.LoadAdapter, request, timeout, metadata, None)
        return adapter_of(reply.adapter)

    def push_adapter(
        self,
        name: str,
        source: AdapterSource,
        *,
        pinned: bool = False,
        replace: bool = False,
        progress: bool | Progress = True,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> Adapter:
        """Send an adapter to the server, which needs no disk for it. `source` is a directory that PEFT wrote,
        or the values of its config with its arrays. `progress` says whether to show a bar on stderr, if that
        is a terminal, or is a function that is called with the bytes that were sent and those that there are.

        There is no default `timeout`. The same adapter may be sent again. Raises AdapterRefused,
        TensorsRefused, AdapterExists and TooManyAdapters; nothing has changed then.
        """
        self._check_one_server()
        push = push_of(name, source, pinned=pinned, replace=replace, progress=progress)
        attempts = self._attempts(timeout)
        request = control_pb2.GetServerInfoRequest()
        info = self._unary(self.control.GetServerInfo, request, attempts.timeout(), metadata)
        chunk_bytes = chunk_bytes_of(info.max_chunk_bytes)
        push, sent = push.described(), self._sent(metadata)
        reply = self._repeated(
            lambda left: send(
                lambda steps: self.control.PushAdapter.future(steps, timeout=left, metadata=sent),
                push,
                chunk_bytes,
            ),
            attempts,
        )
        return adapter_of(reply.adapter)

    def unload_adapter(
        self, name: str, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> int:
        """Drop an adapter, and return how many outputs still run on it, which they do to their end. Raises
        UnknownAdapter.
        """
        self._check_one_server()
        with checked("name"):
            request = adapters_pb2.UnloadAdapterRequest(name=name)
        return self._unary(self.control.UnloadAdapter, request, timeout, metadata).running_requests

    def pin_adapter(
        self,
        name: str,
        pinned: bool = True,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> Adapter:
        """Keep an adapter's place on the device until it is unloaded, or with `pinned` false no longer.
        Raises UnknownAdapter and TooManyAdapters.
        """
        self._check_one_server()
        with checked("name"):
            request = adapters_pb2.PinAdapterRequest(name=name, pinned=pinned)
        return adapter_of(self._unary(self.control.PinAdapter, request, timeout, metadata).adapter)


# ruff: noqa: ASYNC109 - `timeout` is the deadline of the RPC, which gRPC also sends to the server


class AsyncAdapters(AsyncReadings):
    """Loads, lists and unloads adapters."""

    async def list_adapters(
        self, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> tuple[Adapter, ...]:
        """Tell the adapters that the server has in memory and the caller may use, in the order of their
        names.
        """
        request = adapters_pb2.ListAdaptersRequest()
        reply = await self._unary(self.control.ListAdapters, request, timeout, metadata)
        return tuple(map(adapter_of, reply.adapters))

    async def load_adapter(
        self,
        name: str,
        *,
        uri: str | None = None,
        pinned: bool = False,
        replace: bool = False,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> Adapter:
        """Have the server read an adapter from its own disk: the directory `name` below its --adapter-dir, or
        the one that `uri` names, such as "file:///adapters/sql". `pinned` keeps its place on the device, and
        `replace` lets it take the place of another adapter of this name.

        There is no default `timeout`. Raises AdapterRefused, AdapterExists and TooManyAdapters.
        """
        self._check_one_server()
        request = load_request(name, uri, pinned=pinned, replace=replace)
        reply = await self._unary(self.control.LoadAdapter, request, timeout, metadata, None)
        return adapter_of(reply.adapter)

    async def push_adapter(
        self,
        name: str,
        source: AdapterSource,
        *,
        pinned: bool = False,
        replace: bool = False,
        progress: bool | Progress = True,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> Adapter:
        """Send an adapter to the server, which needs no disk for it. `source` is a directory that PEFT wrote,
        or the values of its config with its arrays. `progress` says whether to show a bar on stderr, if that
        is a terminal, or is a function that is called with the bytes that were sent and those that there are.

        There is no default `timeout`. The same adapter may be sent again. Raises AdapterRefused,
        TensorsRefused, AdapterExists and TooManyAdapters; nothing has changed then.
        """
        self._check_one_server()
        push = await asyncio.to_thread(
            push_of, name, source, pinned=pinned, replace=replace, progress=progress
        )
        attempts = self._attempts(timeout)
        request = control_pb2.GetServerInfoRequest()
        info = await self._unary(self.control.GetServerInfo, request, attempts.timeout(), metadata)
        chunk_bytes = chunk_bytes_of(info.max_chunk_bytes)
        push, sent = await asyncio.to_thread(push.described), self._sent(metadata)
        reply: adapters_pb2.PushAdapterResponse = await self._repeated(
            lambda left: start(self.channel, _PUSH, adapters_pb2.PushAdapterResponse, left, sent),
            attempts,
            lambda call: async_send(call, push, chunk_bytes),
        )
        return adapter_of(reply.adapter)

    async def unload_adapter(
        self, name: str, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> int:
        """Drop an adapter, and return how many outputs still run on it, which they do to their end. Raises
        UnknownAdapter.
        """
        self._check_one_server()
        with checked("name"):
            request = adapters_pb2.UnloadAdapterRequest(name=name)
        return (await self._unary(self.control.UnloadAdapter, request, timeout, metadata)).running_requests

    async def pin_adapter(
        self,
        name: str,
        pinned: bool = True,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> Adapter:
        """Keep an adapter's place on the device until it is unloaded, or with `pinned` false no longer.
        Raises UnknownAdapter and TooManyAdapters.
        """
        self._check_one_server()
        with checked("name"):
            request = adapters_pb2.PinAdapterRequest(name=name, pinned=pinned)
        return adapter_of((await self._unary(self.control.PinAdapter, request, timeout, metadata)).adapter)
