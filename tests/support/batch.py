"""Submits many requests to an engine at once, and collects the outputs of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.engine import Engine
from penstock.runtime.requests.request import Finish, Request, StepOutput, TokenLogprobs
from tests.support.collector import Collector, at_gate


@dataclass(frozen=True)
class Answer:
    """All outputs of one request."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    finish: Finish | None
    error: Exception | None
    preemptions: int
    cached_prompt_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    hidden: list[NDArray[np.float32]]
    """What outputs had of hidden states, [tokens, E] each, or the pooled one, [E]."""
    weights: int
    """The generation of the weights that made the last output."""

    @classmethod
    def of(cls, outputs: Sequence[StepOutput]) -> Answer:
        last = outputs[-1]
        assert last.timing is not None
        return cls(
            tokens=[t for output in outputs for t in output.token_ids],
            logprobs=[t for output in outputs for t in output.logprobs],
            prompt_logprobs=[t for output in outputs for t in output.prompt_logprobs],
            finish=last.finish,
            error=last.error,
            preemptions=last.timing.preemptions,
            cached_prompt_tokens=last.timing.cached_prompt_tokens,
            proposed_tokens=last.timing.proposed_tokens,
            accepted_tokens=last.timing.accepted_tokens,
            hidden=[output.hidden for output in outputs if output.hidden is not None],
            weights=last.weights_generation,
        )


def answers(
    engine: Engine, requests: Iterable[Request], timeout_s: float = 120, *, together: bool = False
) -> list[Answer]:
    """Submit all requests in this order and wait until all have ended; their ids must differ. `together`: the
    engine is idle, and takes none of them up before all have arrived.
    """
    sink = Collector()
    gate = at_gate(engine, "gate", tokens=1) if together else None
    ids = []
    for request in requests:
        engine.submit(request, sink)
        ids.append(request.request_id)
    if gate is not None:
        gate.open()
    for request_id in ids:
        sink.last(request_id, timeout_s)
    return [Answer.of(sink.outputs[request_id]) for request_id in ids]


def answer(engine: Engine, request: Request) -> Answer:
    """Submit one request alone, and wait until it has ended."""
    return answers(engine, [request])[0]
