"""LoadAdapter, PushAdapter, UnloadAdapter, PinAdapter and ListAdapters: from messages to the engine's
adapters and back. What blocks runs in threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from functools import partial

from google.protobuf.duration_pb2 import Duration

from penstock.runtime.adapters.interface import AdapterInfo
from penstock.runtime.adapters.upload import AdapterUpload
from penstock.runtime.errors import UnsupportedFeature
from penstock.service.access.callers import CURRENT_CALLER
from penstock.service.access.roles import check_adapter
from penstock.service.errors import Busy
from penstock.service.replies.messages import adapter_message, duration_of
from penstock.service.requests.adapters import SentAdapter, named_adapter, to_load, to_push
from penstock.service.requests.generate import WHY_NO_ADAPTERS
from penstock.service.requests.support import check_supported
from penstock.service.rpcs.interceptors import Undecoded
from penstock.service.servicers.serving import Serving
from penstock.service.servicers.weights import Confirm, OpenUpload, first_of, until_commit, write_chunks
from penstock.v1 import adapters_pb2

log = logging.getLogger(__name__)
MOST_PUSHED = 2
"""How many adapters are taken as streams at once: each may have gigabytes."""


class Adapters:
    """The adapters of one engine, for those who load and list them. Used on the event loop only."""

    def __init__(self, serving: Serving, *, max_chunk_bytes: int) -> None:
        """`max_chunk_bytes` is the largest chunk that is taken."""
        self._adapters = serving.engine.adapters
        self._root = serving.engine.config.adapter_dir
        self._lanes = serving.lanes
        self._calls = serving.calls
        self._max_chunk_bytes = max_chunk_bytes
        self._num_pushed = 0

    @property
    def are_on(self) -> bool:
        """Whether the server has places for adapters."""
        return self._adapters.is_on

    async def load(self, request: adapters_pb2.LoadAdapterRequest) -> adapters_pb2.LoadAdapterResponse:
        """Have the engine read an adapter from the server's directory of adapters."""
        self._check_on("LoadAdapter")
        caller = CURRENT_CALLER.get()
        check_adapter(caller, request.name)  # before it is looked whether it exists
        began_s = time.monotonic()
        async with self._calls.preparing():
            asked = await self._lanes.weights(partial(to_load, request, self._root, caller))
            load = partial(
                self._adapters.load,
                asked.name,
                asked.directory,
                pinned=asked.pinned,
                replace=asked.replace,
            )
            info = await self._lanes.weights(load)
        loaded_in = _tell(info, began_s)
        return adapters_pb2.LoadAdapterResponse(adapter=_message(info), loaded_in=loaded_in)

    async def push(
        self, steps: AsyncIterator[Undecoded], confirm: Confirm
    ) -> adapters_pb2.PushAdapterResponse:
        """Take an adapter: begin, chunks, commit, end of the stream. Before all of them have come, nothing
        has changed.

        `confirm` sends the client something, and raises if the client is gone.
        """
        self._check_on("PushAdapter")
        if self._num_pushed >= MOST_PUSHED:
            raise Busy("adapter_pushes", MOST_PUSHED)
        self._num_pushed += 1
        try:
            async with self._calls.preparing():
                return await self._push(steps, confirm)
        finally:
            self._num_pushed -= 1

    async def _push(
        self, steps: AsyncIterator[Undecoded], confirm: Confirm
    ) -> adapters_pb2.PushAdapterResponse:
        began_s = time.monotonic()
        first = await first_of(steps)
        sent: SentAdapter = await self._lanes.weights(lambda: to_push(first.decode()))
        check_adapter(CURRENT_CALLER.get(), sent.name)
        load = partial(self._adapters.load, sent.name, pinned=sent.pinned, replace=sent.replace)
        open_it = partial(AdapterUpload, load, self._adapters.check, sent.config, sent.manifest)
        async with OpenUpload(self._lanes, open_it) as opened:
            take = partial(write_chunks, opened.upload, self._max_chunk_bytes)
            total_bytes = await until_commit(steps, take, opened)
            await confirm()
            info = await self._lanes.weights(partial(opened.upload.commit, total_bytes))
        return adapters_pb2.PushAdapterResponse(
            adapter=_message(info), loaded_in=_tell(info, began_s), bytes_received=total_bytes
        )

    async def unload(self, request: adapters_pb2.UnloadAdapterRequest) -> adapters_pb2.UnloadAdapterResponse:
        """Take an adapter's name away."""
        self._check_on("UnloadAdapter")
        name = named_adapter(request)
        check_adapter(CURRENT_CALLER.get(), name)

        def unload() -> int:
            num_running = self._adapters.get(name).num_running
            self._adapters.unload(name)
            return num_running

        num_running = await self._lanes.weights(unload)
        log.info("adapter %a is unloaded; %d outputs finish on it", name, num_running)
        return adapters_pb2.UnloadAdapterResponse(running_requests=num_running)

    async def pin(self, request: adapters_pb2.PinAdapterRequest) -> adapters_pb2.PinAdapterResponse:
        """Keep an adapter in memory, or no longer."""
        self._check_on("PinAdapter")
        name = named_adapter(request)
        check_adapter(CURRENT_CALLER.get(), name)
        info = await self._lanes.weights(partial(self._adapters.pin, name, request.pinned))
        return adapters_pb2.PinAdapterResponse(adapter=_message(info))

    def list(self, request: adapters_pb2.ListAdaptersRequest) -> adapters_pb2.ListAdaptersResponse:
        """Tell the adapters in memory that the caller may use."""
        check_supported(request)
        caller = CURRENT_CALLER.get()
        return adapters_pb2.ListAdaptersResponse(
            adapters=[
                _message(info)
                for info in sorted(self._adapters.list(), key=lambda info: info.name)
                if caller.allows_adapter(info.name)
            ]
        )

    def _check_on(self, rpc: str) -> None:
        if not self.are_on:
            raise UnsupportedFeature([rpc], WHY_NO_ADAPTERS["adapter"])


def _message(info: AdapterInfo) -> adapters_pb2.Adapter:
    return adapter_message(info, with_source=CURRENT_CALLER.get().controls)


def _tell(info: AdapterInfo, began_s: float) -> Duration:
    """Log that an adapter was loaded, and return how long that took. The name is the caller's."""
    seconds = time.monotonic() - began_s
    log.info(
        "adapter %a is loaded: rank %d, %d bytes, digest %.12s, %.3f s",
        info.name,
        info.rank,
        info.num_bytes,
        info.digest,
        seconds,
    )
    return duration_of(seconds)
