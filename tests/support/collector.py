"""Sinks for tests, and the greedy requests that most of them submit."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.runtime import Engine, SamplingParams, StoppingParams
from penstock.runtime.requests.request import Request, StepOutput
from penstock.runtime.requests.sampling import ResolvedSampling

GREEDY = ResolvedSampling(temperature=0.0)
GREEDY_PARAMS = SamplingParams(temperature=0.0)
"""The same sampling as GREEDY, as `Engine.generate` takes it."""


def long(max_tokens: int = 60) -> StoppingParams:
    return StoppingParams(max_tokens=max_tokens, ignore_eos=True)


class Collector:
    """A sink that collects outputs by request and lets a test wait for the last one."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[StepOutput]] = {}
        self.calls = 0
        self._changed = threading.Condition()

    def __call__(self, outputs: Sequence[StepOutput]) -> None:
        with self._changed:
            self.calls += 1
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            self._changed.notify_all()

    def last(self, request_id: str, timeout_s: float = 60) -> StepOutput:
        with self._changed:
            assert self._changed.wait_for(lambda: self._has_ended(request_id), timeout_s)
            return self.outputs[request_id][-1]

    def first(self, request_id: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self.outputs, 60)

    def tokens(self, request_id: str) -> list[int]:
        return [t for output in self.outputs.get(request_id, ()) for t in output.token_ids]

    def _has_ended(self, request_id: str) -> bool:
        return request_id in self.outputs and self.outputs[request_id][-1].last


def submit(
    engine: Engine, sink: Collector, request_id: str, prompt: Sequence[int] = (1,), tokens: int = 100
) -> None:
    engine.submit(Request(request_id, tuple(prompt), GREEDY, long(tokens)), sink)


class Gate:
    """A sink that holds the engine's thread at its first call until `open`."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()
        self.sink = Collector()

    def __call__(self, outputs: Sequence[StepOutput]) -> None:
        self.reached.set()
        assert self._opened.wait(60)
        self.sink(outputs)

    def open(self) -> None:
        self._opened.set()


def at_gate(engine: Engine, request_id: str = "held", tokens: int = 20) -> Gate:
    """Submit a request and return when its first token is being delivered, while its next step is in
    flight.
    """
    gate = Gate()
    engine.submit(Request(request_id, (1,), GREEDY, long(tokens)), gate)
    assert gate.reached.wait(60)
    return gate
