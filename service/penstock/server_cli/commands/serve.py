"""`penstock serve MODEL`: loads a model and serves it until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import runtime
from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError, PenstockError
from penstock.runtime.following.interface import Lead
from penstock.server_cli.processes.follower import GROUP_ENDED, Follower, end_now
from penstock.server_cli.processes.openai_front import OpenAIFront, front_settings, socket_for_the_front
from penstock.server_cli.serving.flags import options_of, with_flags
from penstock.server_cli.serving.group_flags import GroupFlags, check_server, group_options
from penstock.server_cli.serving.serve_flags import (
    add_parser,
    engine_config,
    log_options,
    server_options,
    tracing_options,
)
from penstock.service.group.leader import GroupLeader
from penstock.service.identity import new_instance_id, version
from penstock.service.limits.bounds import FOR_OTHERS, MANY, raise_limit
from penstock.service.options import ServerOptions
from penstock.service.server import PenstockServer
from penstock.service.telemetry.logs.writing import open_logs
from penstock.service.telemetry.opening import open_collector, open_tracing
from penstock.service.threads.lanes import in_thread

if TYPE_CHECKING:
    from penstock.openai.settings import Settings
    from penstock.runtime.engine import Engine
    from penstock.service.telemetry.metrics.push import Collector
    from penstock.service.telemetry.otlp.tracing import Tracing

__all__ = ["add_parser", "run"]

log = logging.getLogger("penstock.serve")

_MEMORY_FRACTION = "0.95"
"""The share of an accelerator's memory that JAX may take; `--hbm-utilization` is a share of this."""


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop. Returns 0 after a graceful end, 1 if the server cannot start, or if the
    engine, an address or the OpenAI front is lost, and GROUP_ENDED if another process of its group is.
    """
    # JAX reads this when it first looks for devices. By its own default a quarter of an accelerator stays
    # unused.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _MEMORY_FRACTION)
    with socket_for_the_front(args) as is_private:
        end = _run(args, is_private)
    if end.by_force:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(end.code)
    return end.code


@dataclass(frozen=True, slots=True)
class _End:
    code: int
    by_force: bool = False
    """A thread of the engine is busy compiling, or hangs, and would keep the process from ending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What the command line asks for."""

    model: str
    config: EngineConfig
    adapters: Sequence[tuple[str, Path]]
    """What is loaded before the server is ready: each name with its directory."""
    options: ServerOptions
    front: Settings | None
    """What the OpenAI front is told."""
    socket_is_private: bool
    """Whether the Unix socket is for the front alone."""
    tracing: Tracing | None
    collector: Collector | None
    instance_id: str
    group: GroupLeader | None
    """The group that this process leads."""
    flags: Mapping[str, str]
    """The flags that set the options, by the options' names."""


def _run(args: argparse.Namespace, socket_is_private: bool) -> _End:
    try:
        open_logs(log_options(args))
        options = server_options(args)
        front = front_settings(args, options)
        config = engine_config(args)
        group = group_options(args, os.environ)
        check_server(options, group)
        if group.is_group and not group.leads:
            follower = Follower(args.model, config, group, options, options_of(GroupFlags, args))
            return _follow(follower, args.flags)
        leader = GroupLeader(group, end_now) if group.leads else None
        instance_id = new_instance_id()
        otlp, named = tracing_options(args), {"version": version(), "instance_id": instance_id}
        collector = open_collector(options.metrics, otlp, **named)
        tracing = open_tracing(otlp, **named)
    except ConfigError as error:
        _complain(error, args.flags)
        return _End(2)
    raise_limit((options.bounds.max_connections or MANY) * options.num_addresses + FOR_OTHERS)
    wanted = _Wanted(
        model=args.model,
        config=config,
        adapters=args.adapters,
        options=options,
        front=front,
        socket_is_private=socket_is_private,
        tracing=tracing,
        collector=collector,
        instance_id=instance_id,
        group=leader,
        flags=args.flags,
    )
    end = asyncio.run(_serve(wanted)) if leader is None else _lead(wanted, leader)
    if tracing is not None:
        tracing.shutdown(0.0)  # which the server has done, unless it could not even be made
    if collector is not None:
        collector.exporter.close()  # likewise
    return end


def _follow(follower: Follower, flags: Mapping[str, str]) -> _End:
    """Follow a leader until it stops. The process then ends by force, see `_lead`."""
    try:
        return _End(follower.run(), by_force=True)
    except PenstockError as error:
        _complain(error, flags)
        return _End(1, by_force=True)


def _lead(wanted: _Wanted, leader: GroupLeader) -> _End:
    """Run the server of a group's leader until it has ended. The process then ends by force, because JAX's
    own end would wait for processes that are gone.
    """
    try:
        code = asyncio.run(_serve(wanted)).code
    except Exception:  # whatever it is, the followers must be told before the process ends
        log.exception("the leader failed")
        leader.end("the leader failed")
        code = 1
    return _End(code if leader.failure is None else GROUP_ENDED, by_force=True)


async def _serve(wanted: _Wanted) -> _End:
    """Run the server until it has ended."""
    told_to_stop = asyncio.Event()
    signals = _on_signals(told_to_stop)
    stopping = asyncio.ensure_future(told_to_stop.wait())
    options = wanted.options
    server = front = None
    try:
        server = PenstockServer(
            options,
            wanted.tracing,
            collector=wanted.collector,
            instance_id=wanted.instance_id,
            group=wanted.group,
        )
        if wanted.group is not None:
            wanted.group.on_leaving = told_to_stop.set
        if wanted.front is not None:
            front = OpenAIFront(wanted.front)
        if options.metrics.is_exposed:
            log.warning(
                "metrics are served in plaintext on %s: whoever reaches that reads them", options.metrics.host
            )
        hosts = options.hosts if wanted.front is None else (*options.hosts, wanted.front.host)
        lacking = options.listen.lacking(hosts, keys=options.keys is not None)
        if lacking:
            log.warning(
                "listening on %s with %s: whoever reaches that may use the model",
                " and ".join(dict.fromkeys(hosts)),
                " and ".join(lacking),
            )
        if options.keys is not None:
            _reload_on_hangup(server)
        await server.start()
        if front is not None:
            front.start()
        end = await _serve_with(server, front, wanted, stopping)
        # A follower was told to stop, and this process was not.
        is_left = wanted.group is not None and stopping.done() and not signals
        return _End(GROUP_ENDED) if is_left else end
    except PenstockError as error:
        _complain(error, wanted.flags)
        return _End(1)
    finally:
        if server is not None:
            await _stop(server, front, options.drain_delay_s)


def _complain(error: PenstockError, flags: Mapping[str, str]) -> None:
    """Say on stderr why nothing is served."""
    print(f"penstock serve: {with_flags(str(error), flags)}", file=sys.stderr)


async def _serve_with(
    server: PenstockServer,
    front: OpenAIFront | None,
    wanted: _Wanted,
    stopping: asyncio.Future[Any],
) -> _End:
    """Load the model and serve it until told to stop. `server` answers health checks meanwhile."""
    options = wanted.options
    failing = asyncio.ensure_future(_wait_for_failure(server, front))
    ends = (stopping, failing)
    # `runtime.Engine` loads JAX, which takes a second: until then health is answered, and a mistake in the
    # options or a port in use was told.
    loading = asyncio.ensure_future(in_thread(lambda: _load(wanted)))
    if not await _first(loading, *ends):
        return _End(int(failing.done()), by_force=True)
    engine = loading.result()
    _tell(engine)
    server.attach(engine)
    starting = asyncio.ensure_future(server.start_engine())
    if not await _first(starting, *ends):
        return _End(int(failing.done()), by_force=True)
    starting.result()
    if front is None or await _first(asyncio.ensure_future(front.listening()), *ends):
        _tell_addresses(server, front, wanted.socket_is_private)
    has_failed = await _first(failing, stopping)
    log.info("stopping: no new requests; running ones have %g s", options.grace_s)
    await _stop(server, front, options.drain_delay_s)
    if server.engine_hangs:
        return _End(1, by_force=True)
    log.info("stopped")
    return _End(int(has_failed))


def _load(wanted: _Wanted) -> Engine:
    """Load the model, together with the followers if there are any, and the adapters."""
    group = wanted.group
    lead = None if group is None else Lead(group.options, group)
    # A leader waits in there until its followers come, and answers health meanwhile.
    with _without_collections() if group is None else contextlib.nullcontext():
        from_pretrained = runtime.Engine.from_pretrained  # JAX and the engine are imported here
        # What is there now stays. Otherwise the collections that free the host memory of weights, and the one
        # at the end of the start, would walk over all of it: a sixth of a second.
        gc.freeze()
        engine = from_pretrained(wanted.model, wanted.config, lead=lead)
    for name, directory in wanted.adapters:
        try:
            info = engine.adapters.load(name, directory)
        except PenstockError as error:
            raise ConfigError(f"adapters: {name}={directory}: {error}") from error
        log.info("adapter %s: rank %d, %d bytes, from %s", name, info.rank, info.num_bytes, directory)
    return engine


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python from looking for garbage: a load makes a million objects that stay, over which it would go
    again and again, for a tenth of the load's processor time. `Engine.start` collects once.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def _wait_for_failure(server: PenstockServer, front: OpenAIFront | None) -> None:
    """Wait until the server has lost its engine or an address, or cannot have an OpenAI front."""
    waits = [asyncio.ensure_future(server.wait_for_failure())]
    if front is not None:
        waits.append(asyncio.ensure_future(front.wait_for_failure()))
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


async def _stop(server: PenstockServer, front: OpenAIFront | None, drain_delay_s: float) -> None:
    """Have both finish what runs within the grace. May be called again."""
    stopping = asyncio.ensure_future(server.stop())
    if front is not None:
        # While health says already that the server stops, requests are still taken, over HTTP too.
        await asyncio.wait((stopping,), timeout=drain_delay_s)
        front.stop()
    await stopping
    if front is not None:
        await front.close()


async def _first(wanted: asyncio.Future[Any], *ends: asyncio.Future[Any]) -> bool:
    """Wait for any of these futures. Returns whether `wanted` is done."""
    await asyncio.wait((wanted, *ends), return_when=asyncio.FIRST_COMPLETED)
    return wanted.done()


def _on_signals(told_to_stop: asyncio.Event) -> list[int]:
    """Let the first SIGTERM or SIGINT ask to stop, and the second end the process. The signals that come are
    put into the list that is returned.
    """
    came: list[int] = []

    def stop(number: int) -> None:
        if came:
            log.warning("second signal: ending at once")
            logging.shutdown()
            os._exit(128 + number)
        came.append(number)
        told_to_stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return came


def _reload_on_hangup(server: PenstockServer) -> None:
    """Let SIGHUP, which would end the process, reload the keys."""
    running: set[asyncio.Task[None]] = set()  # the event loop itself keeps no reference to a task

    def reload() -> None:
        task = asyncio.create_task(server.reload_keys())
        running.add(task)
        task.add_done_callback(running.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def _tell(engine: Engine) -> None:
    """Log what was resolved, one line each."""
    info, config = engine.info, engine.config
    dtype = config.dtype if config.quantization == "none" else f"{config.dtype} with {config.quantization}"
    if config.kv_cache_dtype != "auto":
        dtype += f", KV cache in {config.kv_cache_dtype}"
    log.info("model %s: %s, %s, vocabulary %d", info.name, info.architecture, dtype, info.vocab_size)
    log.info("device: %s; CPU threads: %s", ", ".join(info.devices), config.threads)
    running, waiting = config.max_num_seqs, config.max_queued_requests
    log.info("context %d tokens; at most %d requests run and %d wait", info.max_model_len, running, waiting)
    log.info(
        "at most %d tokens a step; %d feature slots", config.max_num_batched_tokens, config.feature_slots
    )
    log.info("scheduling: %s; prefix cache: %s", config.scheduling_policy, _prefix_cache(config))
    defaults = dataclasses.asdict(info.defaults)
    log.info("sampling defaults: %s", ", ".join(f"{name} {value:g}" for name, value in defaults.items()))
    log.info("compiled programs are kept in %s", config.compilation_cache or "memory only")


def _tell_addresses(server: PenstockServer, front: OpenAIFront | None, socket_is_private: bool) -> None:
    """Print the addresses on stdout, for people and scripts."""
    if server.metrics.address is not None:
        _print_line(f"penstock: metrics on {server.metrics.address}")
    if server.addresses.control_address is not None:
        _print_line(f"penstock: control on {server.addresses.control_address}")
    if front is not None:
        _print_line(f"penstock: openai on {front.url}")
    addresses = server.addresses.main
    for address in addresses[:1] if socket_is_private else addresses:
        _print_line(f"penstock: ready on {address}")


def _print_line(text: str) -> None:
    """Print a line in one write.

    `print` makes two of it where stdout has no buffer, and a line of the log could come between an address
    and its newline.
    """
    print(f"{text}\n", end="", flush=True)


def _prefix_cache(config: EngineConfig) -> str:
    most = config.prefix_cache_pages
    if most == 0:
        return "off"
    pages = "all free pages" if most is None else f"at most {most} pages"
    return f"{pages}, {config.state_snapshots} snapshots of state" if config.state_snapshots else pages
