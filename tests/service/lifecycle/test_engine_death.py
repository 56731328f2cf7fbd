"""The real engine dies under a server: what callers, watchers and operators see of that."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from penstock.runtime.errors import EngineFailure
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.service.services import SERVICES
from penstock.v1 import control_pb2, inference_pb2
from tests.service.rig import WAIT_S, failure_of, generate, read_all, serving, stream
from tests.support.models.toy import toy_engine

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PROMPT = {"ids": [1]}
ENDLESS = {"max_tokens": 120, "ignore_eos": True}


class PanicException(BaseException):
    """A panic of an extension in Rust, as pyo3 raises it."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("lost"),
        pytest.param(PanicException("lost"), marks=pytest.mark.ci),
        pytest.param(SystemExit(1), marks=pytest.mark.ci),
    ],
)
@pytest.mark.parametrize("method", ["schedule", "commit"])
async def test_everybody_hears_of_it_at_once(monkeypatch, method, error):
    """Health is NOT_SERVING before the first caller gets its error, so that a retry goes to
    another server.
    """
    engine = toy_engine(start=False, overlap=False, max_decode_steps=1)
    works, calls, breaks = getattr(Scheduler, method), itertools.count(), threading.Event()

    def breaking(*args: Any, **kwargs: Any) -> Any:
        if next(calls) < 3:
            return works(*args, **kwargs)
        assert breaks.wait(WAIT_S)
        raise error

    monkeypatch.setattr(Scheduler, method, breaking)
    async with serving(engine) as rig:
        watch = rig.health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))
        assert (await watch.read()).status == SERVING
        opened = rig.inference.Stream(stream(prompt_token_ids=PROMPT, stopping=ENDLESS))
        assert (await opened.read()).HasField("started")
        assert (await opened.read()).HasField("delta")
        # Not `load`, nor anything else that needs the lock: the engine's thread holds it until it breaks.
        breaks.set()
        failure = await failure_of(_rest(opened))
        assert (failure.code.name, failure.reason) == ("INTERNAL", "ENGINE_FAILURE")
        assert [await rig.health_of(service) for service in ("", *SERVICES)] == [NOT_SERVING] * 3
        assert (await asyncio.wait_for(watch.read(), WAIT_S)).status == NOT_SERVING
        watch.cancel()
        await asyncio.wait_for(rig.server.wait_for_failure(), WAIT_S)
        for late in (
            rig.inference.Generate(generate(prompt_token_ids=PROMPT)),
            _rest(rig.inference.Stream(stream(prompt_token_ids=PROMPT))),
            rig.inference.Abort(inference_pb2.AbortRequest(request_id_prefix="r")),
        ):
            failure = await failure_of(late)
            assert (failure.code.name, failure.reason) == ("UNAVAILABLE", "ENGINE_DEAD")
        load = await rig.control.GetLoad(control_pb2.GetLoadRequest())
        assert (load.running_requests, load.queued_requests, load.kv_pages_used) == (0, 0, 0)
        assert isinstance(engine.failure, EngineFailure)
        assert await asyncio.wait_for(rig.server.stop(), WAIT_S)


async def _rest(call: Any) -> list[Any]:
    return [message async for message in read_all(call)]
