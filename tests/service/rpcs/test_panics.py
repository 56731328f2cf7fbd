"""Errors that are no Exception, such as panics of libraries in Rust, end their call like any other bug, and
what gRPC raises because the client is gone ends it as cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.service.access.callers import ANYBODY
from penstock.service.rpcs.interceptors import PenstockInterceptor
from penstock.service.telemetry.tracing.service_spans import Telemetry
from penstock.service.usage.meter import CURRENT_METER, Meter, Outcome, Usage
from penstock.v1 import control_pb2, telemetry_pb2
from tests.service.rig import WAIT_S, Rig, collect, failure_of, fake, generate, serving, stream, until

SECRET = "xyzzy"


class PanicException(BaseException):
    """As that of pyo3, whose only base is BaseException."""


class Ledger:
    """Keeps what each request used."""

    def __init__(self) -> None:
        self.usages: list[Usage] = []

    def record(self, usage: Usage) -> None:
        self.usages.append(usage)


def panics(*_: Any, **__: Any) -> Any:
    raise PanicException(f"called `Option::unwrap()` on {SECRET}")


def calls(rig: Rig) -> dict[str, Any]:
    """One call of each kind, not begun."""
    return {
        "Generate": lambda: rig.inference.Generate(generate("a", request_id="r")),
        "Stream": lambda: collect(rig.inference.Stream(stream("a", request_id="r"))),
        "Tokenize": lambda: rig.control.Tokenize(control_pb2.TokenizeRequest(text="a")),
        "WatchLoad": lambda: rig.control.WatchLoad(telemetry_pb2.WatchLoadRequest()).read(),
    }


@pytest.mark.parametrize("kind", ["Generate", "Stream", "Tokenize", "WatchLoad"])
async def test_a_panic_before_the_engine_has_the_request_ends_the_call(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, ledger = fake(), Ledger()
    assert engine.text is not None
    async with serving(engine, usage=ledger) as rig:
        with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
            patch.setattr(engine.text, "encode", panics)
            patch.setattr(engine, "metrics", panics)
            failure = await failure_of(calls(rig)[kind]())
        assert (failure.code.name, failure.reason) == ("INTERNAL", "INTERNAL")
        assert SECRET not in failure.message
        assert "a bug in the service" in caplog.text
        if kind in ("Generate", "Stream"):
            (usage,) = ledger.usages
            assert (usage.request_id, usage.outcome, usage.reason) == ("r", Outcome.REFUSED, "INTERNAL")
        await rig.inference.Generate(generate("y"))


@pytest.mark.parametrize("kind", ["Generate", "Stream"])
async def test_a_panic_in_the_text_of_an_output_ends_that_request_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another request's outputs of the same step still come."""
    engine, ledger = fake(hold=True), Ledger()
    async with serving(engine, usage=ledger) as rig:
        bad = asyncio.ensure_future(calls(rig)[kind]())
        await until(lambda: len(engine.seen) == 1)
        (buffer,) = rig.serving.switchboard.holders.values()
        monkeypatch.setattr(buffer, "_live", _Panics())
        good = asyncio.ensure_future(rig.inference.Generate(generate("b")))
        await until(lambda: len(engine.seen) == 2)
        engine.release()
        failure = await failure_of(bad)
        assert (failure.code.name, failure.reason) == ("INTERNAL", "INTERNAL")
        assert SECRET not in failure.message
        assert (await asyncio.wait_for(good, WAIT_S)).outputs[0].text.endswith("z")
    by_id = {usage.request_id: usage.outcome for usage in ledger.usages}
    assert by_id["r"] is Outcome.FAILED


class _Panics:
    add = staticmethod(panics)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
async def test_what_ends_the_process_or_the_task_stays_what_it_is(error: BaseException) -> None:
    interceptor = PenstockInterceptor(Telemetry())
    context: Any = None  # nothing is sent
    with pytest.raises(type(error)):
        await interceptor._fail(error, interceptor._start("a/Method"), context)


class _Gone:
    """The context of a call whose client has gone: no status can be sent any more."""

    def __init__(self, remaining_s: float | None) -> None:
        self._remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self._remaining_s

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort(self, *_: Any) -> None:
        raise grpc.aio.InternalError("the client is gone")


@pytest.mark.parametrize(
    ("remaining_s", "code"), [(None, "CANCELLED"), (60.0, "CANCELLED"), (0.0, "DEADLINE_EXCEEDED")]
)
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (grpc.aio.InternalError("a reply cannot be written"), Outcome.VANISHED),
        (InvalidRequest([Violation("a", "b")]), Outcome.REFUSED),
    ],
    ids=["reply", "status"],
)
async def test_a_client_that_is_gone_when_something_is_sent_to_it_has_cancelled(
    error: BaseException, outcome: Outcome, remaining_s: float | None, code: str
) -> None:
    ended: list[tuple[str, str]] = []
    ledger = Ledger()
    meters: Any = SimpleNamespace(
        call_ended=lambda method, code, _: ended.append((method, code)), refused=lambda reason: None
    )
    interceptor = PenstockInterceptor(Telemetry(), meters=meters)
    CURRENT_METER.set(Meter(ANYBODY, "a/Method", None, ledger))
    with pytest.raises(asyncio.CancelledError):
        await interceptor._fail(error, interceptor._start("a/Method"), cast("Any", _Gone(remaining_s)))
    assert ended == [("a/Method", code)]
    (usage,) = ledger.usages
    assert usage.outcome is outcome
