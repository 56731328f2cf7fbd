"""Errors that are no Exception, such as panics of libraries in Rust, end their call like any other bug."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from penstock.service.rpcs.interceptors import PenstockInterceptor
from penstock.service.telemetry.tracing.service_spans import Telemetry
from penstock.service.usage.meter import Outcome, Usage
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
