"""The gRPC server around one engine: listens, answers health checks, loads, serves, and stops gracefully.

    server = PenstockServer(options)  # takes the port before anything slow: a port in use fails at once
    await server.start()              # answers; health says NOT_SERVING, RPCs of the contract NOT_READY
    server.attach(engine)             # answers RPCs that need no running engine
    await server.start_engine()       # compiles; then health says SERVING
    await server.stop()               # refuses new requests, finishes the running ones

It must be made and used on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import grpc

from penstock.runtime.adapters.interface import AdapterInfo
from penstock.runtime.errors import ConfigError, GroupEnded
from penstock.runtime.model_info import ModelInfo
from penstock.service.access.keys import Keys
from penstock.service.access.rates import Clock
from penstock.service.addresses import Addresses, Serve
from penstock.service.backend import Backend
from penstock.service.counts import AdapterRequests, show_adapters, show_counts
from penstock.service.group.leader import FOLLOW, GroupLeader
from penstock.service.identity import new_instance_id
from penstock.service.lifecycle import health
from penstock.service.lifecycle.underway import Calls
from penstock.service.lifecycle.watchdog import EngineEnd, Watchdog
from penstock.service.limits.admission import Admission, HeldImages, Places, Receiving
from penstock.service.listening.grpc_server import MakeServer
from penstock.service.options import ServerOptions
from penstock.service.replies.outputs import ServerSwitchboard, StallLog
from penstock.service.replies.reply_budget import ReplyBudget
from penstock.service.rpcs.ending import Sends
from penstock.service.rpcs.interceptors import PenstockInterceptor, access_of
from penstock.service.servicers.control import Profiles
from penstock.service.servicers.serving import Serving, limits_of
from penstock.service.servicers.weights import WeightUpdates
from penstock.service.services import SERVICES, Services
from penstock.service.telemetry.logs import grpc_log
from penstock.service.telemetry.metrics.exports import Metrics
from penstock.service.telemetry.tracing.service_spans import Telemetry
from penstock.service.telemetry.tracing.tracer import Tracer
from penstock.service.threads.lanes import Lanes, in_thread, on_this_loop
from penstock.service.usage.ledger import Ledger
from penstock.service.usage.meter import UsageSink

if TYPE_CHECKING:
    from penstock.service.telemetry.metrics.push import Collector
    from penstock.service.telemetry.otlp.tracing import Tracing

log = logging.getLogger(__name__)

READINESS = ("", *SERVICES)
"""The services whose health is SERVING while requests are taken."""
LIVENESS = "liveness"
"""The service whose health is SERVING as long as the process answers at all, also while it loads."""
_LAST_REPLIES_S = 5.0
"""Seconds that readers may take for what is buffered when the grace is over."""
_LAST_WORDS_S = 0.5
"""Seconds that watchers may take for their last status. Connections that do not read it are closed then."""
_LAST_SPANS_S = 1.0
"""Seconds that the last spans have at least, also if requests have used up the grace."""


class PenstockServer:
    """The gRPC server of one engine."""

    def __init__(
        self,
        options: ServerOptions,
        tracing: Tracing | None = None,
        *,
        collector: Collector | None = None,
        instance_id: str | None = None,
        usage: UsageSink | None = None,
        rates_clock: Clock = time.monotonic,
        group: GroupLeader | None = None,
    ) -> None:
        """Take the addresses. Raises ConfigError if one cannot be had, or the keys cannot be read.

        `tracing` records traces, and ends with the server: what is left of the grace is for its last spans.
        With a `collector` metrics are pushed there.
        `instance_id` is made here unless given. `usage` is told what each request used, in place of
        `options.usage_file`. `rates_clock` gives the seconds that the rates of keys are measured by.
        `group`: whom the followers of this process call; it is stopped with the server.
        """
        self._options = options
        self._tracing = tracing
        self._telemetry = Telemetry(tracing)
        self._tracer = None if tracing is None else Tracer(tracing, self._telemetry.wall_clock)
        self.instance_id = instance_id or new_instance_id()
        self.admission = Admission(options.bounds)
        """What may go on at once, and what does."""
        self._keys = None if options.keys is None else Keys(options.keys, clock=rates_clock)
        self._ledger = None if options.usage_file is None else Ledger(options.usage_file)
        self._access = access_of(self._keys, usage or self._ledger, logs_calls=options.access_log)
        self.metrics = Metrics(options.metrics, collector)
        """What the server measures, and the ways out of it."""
        self._lanes = Lanes(self.metrics.meters, options.max_receive_bytes)
        self._stalls = StallLog()
        self.sends = Sends(options.stall_limit_s, self._stalls)
        """What follows every message on its way out."""
        self._calls = Calls()
        self._health = health.Health()
        self._health.set(LIVENESS, serving=True)
        self._readiness = health.Readiness(self._health, READINESS, against="starting")
        self._budget = ReplyBudget(options.replies)
        self._adapter_requests = AdapterRequests()
        show_adapters(self.metrics.registry, self._adapters, self._adapter_evictions, self._adapter_requests)
        show_counts(
            self.metrics.registry,
            readiness=self._readiness,
            admission=self.admission,
            lanes=self._lanes,
            sends=self.sends,
            budget=self._budget,
            tracing=tracing,
        )
        self._group = group
        if group is not None:
            group.on_end = partial(self._lose_group, on_this_loop(self._refuse_without_group))
            group.caller_of = partial(self._access.still, FOLLOW)
        self._services = Services(self._health, options.features, group)
        self.serving: Serving | None = None
        """What its RPCs share, once an engine is attached."""
        self._engine: Backend | None = None
        self._engine_end: EngineEnd | None = None
        self._failed = asyncio.Event()
        self._watchdog: Watchdog | None = None
        self._starting = False
        self._ending: asyncio.Task[bool] | None = None
        try:
            self.addresses = Addresses(options, self._build, self._lose_address)
        except ConfigError:
            self.metrics.close()
            raise

    @property
    def port(self) -> int | None:
        """The port that it listens on; None if it listens on a Unix socket only."""
        return self.addresses.port

    @property
    def address(self) -> str:
        """The address that takes requests: the port, or the Unix socket if there is no port."""
        return self.addresses.main[0]

    def _build(self, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> Serve:
        bounds = self._options.bounds
        ours = PenstockInterceptor(
            self._telemetry,
            self.admission,
            access=self._access,
            receiving=Receiving(
                bounds.max_receiving_rpcs,
                bounds.receive_limit_s,
                update_limit_s=bounds.update_stall_limit_s,
            ),
            lanes=self._lanes,
            max_receive_bytes=self._options.max_receive_bytes,
            sends=self.sends,
            calls=self._calls,
            vocab_size=lambda: 0 if self._engine is None else self._engine.info.vocab_size,
            meters=self.metrics.meters,
        )

        def serve(make: MakeServer) -> grpc.aio.Server:
            server = make(ours.refuse_unknown, interceptors=[self._calls, ours, *interceptors])
            self._services.add_to(server)
            return server

        return serve

    async def reload_keys(self) -> None:
        """Read the file of keys again. A file that cannot be used changes nothing. Raises nothing."""
        if self._keys is not None:
            await self._keys.reload()

    async def start(self) -> None:
        """Start to answer: health and reflection. RPCs of the contract are refused as NOT_READY."""
        grpc_log.hush()
        self.metrics.start()
        await self.addresses.start()

    def attach(self, engine: Backend) -> None:
        """Answer with this engine. Generation is refused as NOT_READY until `start_engine` ends."""
        self._engine, self._engine_end = engine, EngineEnd(engine)
        self.metrics.attach(engine)
        if self._tracer is not None:
            self._tracer.follow(engine.journal)
        self._access.served_model = engine.info.name
        self._lanes.fit(engine.info.max_model_len)
        self._compare_sizes(engine.info)
        self.serving = Serving(
            engine=engine,
            limits=limits_of(engine, self._options.truncation, self._options.features),
            switchboard=ServerSwitchboard(asyncio.get_running_loop()),
            telemetry=self._telemetry,
            access=self._access,
            tracing=self._tracing,
            lanes=self._lanes,
            calls=self._calls,
            places=Places(engine),
            budget=self._budget,
            stalls=self._stalls,
            stall_limit_s=self._options.stall_limit_s,
            max_request_bytes=self._options.max_receive_bytes,
            held_images=HeldImages(self._options.max_held_image_bytes),
            adapter_requests=self._adapter_requests,
        )
        updates = WeightUpdates(
            self.serving,
            roots=self._options.weights_roots,
            max_receive_bytes=self._options.max_receive_bytes,
        )
        profiles = Profiles(self.serving, self._options.profile_dir, keep=self._options.profile_keep)
        self._services.bind(self.serving, updates, profiles, instance_id=self.instance_id)

    def _adapters(self) -> Sequence[AdapterInfo]:
        """List the adapters in memory."""
        return () if self._engine is None else self._engine.adapters.list()

    def _adapter_evictions(self) -> Mapping[str, int]:
        """Tell how many adapters left which memory for others."""
        return {} if self._engine is None else self._engine.adapters.evictions

    def _compare_sizes(self, info: ModelInfo) -> None:
        """Say how large images can be, where requests are smaller than an image may be."""
        largest = self._options.max_receive_bytes
        if info.images is not None and info.images.max_bytes > largest:
            log.info(
                "an image may have %d bytes, but a whole request only %d; larger ones need a larger "
                "--max-receive-bytes",
                info.images.max_bytes,
                largest,
            )

    async def start_engine(self) -> None:
        """Compile and start the engine, then report SERVING. Raises what the engine raises."""
        assert self._engine is not None, "call attach() first"
        assert self._engine_end is not None
        self._starting = True
        try:
            await in_thread(self._engine.start)
        finally:
            self._starting = False
        if self._ending is not None:
            if self._ending.done():  # otherwise the stop itself ends the engine as its last act
                await self._engine_end.shutdown()
            return
        self._readiness.allow("starting")
        self._engine.on_failure(on_this_loop(self._bury))
        self._engine.on_ready_changed(on_this_loop(self._look_at_weights))
        if self._group is not None:
            self._group.watch(self._engine.pulse)
        if self._options.watchdog_s:
            self._watchdog = Watchdog(self._options.watchdog_s, self._engine.pulse, self._mark_hanging)
            self._watchdog.start()

    def _look_at_weights(self) -> None:
        """Note that the weights are whole again, or not any more."""
        assert self._engine is not None
        if self._engine.ready:
            log.warning("the weights are whole again, so health is SERVING")
            self._readiness.allow("weights")
        else:
            log.error("a weight update has failed midway, so health is NOT_SERVING until a full one succeeds")
            self._readiness.refuse("weights")

    def _mark_hanging(self, hangs: bool) -> None:
        if hangs:
            self._readiness.refuse("hangs")
        else:
            self._readiness.allow("hangs")

    def _bury(self) -> None:
        assert self._engine is not None
        log.error("the engine is dead, so the server ends: %s", self._engine.failure)
        self._readiness.refuse("dead")
        self._failed.set()

    def _lose_group(self, refuse: Callable[[], None], error: GroupEnded) -> None:
        """End the service; called on any thread."""
        refuse()
        if self._engine is not None:
            self._engine.give_up(error)

    def _refuse_without_group(self) -> None:
        self._readiness.refuse("group")
        self._failed.set()

    def _lose_address(self, error: BaseException | None) -> None:
        log.error("gRPC stopped listening unexpectedly, so the server ends: %r", error)
        self._readiness.refuse("deaf")
        self._failed.set()

    @property
    def engine_hangs(self) -> bool:
        """Whether a thread of the engine was still running when the server stopped."""
        return self._engine_end is not None and self._engine_end.hangs

    async def wait_for_failure(self) -> None:
        """Wait until the engine is dead, or an address no longer answers."""
        await self._failed.wait()

    async def stop(self) -> bool:
        """Finish what runs within the grace, abort the rest, and stop. Returns whether everything came to its
        end. May be called again, and then waits for the same end.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await asyncio.shield(self._ending)

    async def _end(self) -> bool:
        self._readiness.refuse("stopping")
        engine, end, draining = self._engine, self._engine_end, None
        is_ready = engine is not None and engine.ready
        if is_ready:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._failed.wait(), self._options.drain_delay_s)
        self._calls.drain()
        began_s = time.monotonic()
        if end is not None and is_ready:
            draining = asyncio.create_task(end.drain(self._options.grace_s))
        elif end is not None and self._starting:
            # so that it takes no requests if it starts just now
            draining = asyncio.create_task(end.drain(0.0))
        await self._calls.wait_settled()  # requests that gRPC has accepted are refused as DRAINING meanwhile
        # The server stops listening, and tells clients to go elsewhere. What runs goes on.
        most_s = self._options.grace_s + _LAST_REPLIES_S + _LAST_WORDS_S
        leaving = asyncio.create_task(self.addresses.stop(most_s))
        self._health.close()
        drained = draining is None or await draining
        if end is not None and not drained:
            await end.abort(self._options.grace_s)
        if self._group is not None:
            await in_thread(self._group.stop)
        await self._calls.wait_idle(_LAST_REPLIES_S)
        await self.addresses.stop(_LAST_WORDS_S)
        await leaving
        self._lanes.close()
        if self._ledger is not None:
            await in_thread(self._ledger.close)
        if self._watchdog is not None:
            self._watchdog.stop()
        left_s = max(self._options.grace_s - (time.monotonic() - began_s), _LAST_SPANS_S)
        ending = asyncio.create_task(self.metrics.stop(left_s))
        # a compilation cannot be ended other than with the process
        if end is not None and not self._starting:
            await end.shutdown()
        if self._tracing is not None and self._tracer is not None:
            await in_thread(self._tracer.close)
            left_s = max(self._options.grace_s - (time.monotonic() - began_s), _LAST_SPANS_S)
            await in_thread(partial(self._tracing.shutdown, left_s))
        await ending
        return drained
