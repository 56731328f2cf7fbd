"""Generating for an embedder: from a prompt to text, on the caller's own thread."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.loop.interface import Sink
from penstock.runtime.requests.request import (
    Finish,
    Output,
    Request,
    RequestTiming,
    SamplingParams,
    StoppingParams,
    TokenLogprobs,
)
from penstock.runtime.requests.sampling_defaults import GenerationDefaults
from penstock.runtime.text.assembler import Assembler, Delta
from penstock.runtime.text.codec import TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One whole output: what the deltas of `Engine.stream` come to."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One entry for each token, if they were asked for."""
    finish: Finish
    timing: RequestTiming


class RequestQueue(Protocol):
    """Where requests go; `Engine` is one."""

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; its outputs go to `sink`."""
        ...

    def finish(self, request_id: str, finish: Finish) -> None:
        """End a request for a reason found in its text."""
        ...

    def cancel(self, *request_ids: str) -> None:
        """Free requests that nobody reads any more."""
        ...


def make_request(
    prompt: str | Sequence[int],
    sampling: SamplingParams | None,
    stopping: StoppingParams | None,
    logprobs: int | None,
    request_id: str | None,
    *,
    codec: TextCodec | None,
    defaults: GenerationDefaults,
) -> Request:
    """The request for a prompt of text or token ids. Sampling that is None is the model's `defaults`, and an
    id that is None is made up. InvalidRequest where text is needed and there is no `codec`.
    """
    stopping = stopping or StoppingParams()
    if isinstance(prompt, str):
        if codec is None:
            raise InvalidRequest([Violation("input", "this model has no tokenizer; pass token ids")])
        prompt = codec.encode(prompt)
    elif stopping.stop and codec is None:
        raise InvalidRequest(
            [Violation("stopping.stop", "this model has no tokenizer to find stop strings with")]
        )
    if sampling is None:
        sampling = defaults.sampling()
    return Request(request_id or uuid.uuid4().hex, tuple(prompt), sampling, stopping, logprobs=logprobs)


def stream(requests: RequestQueue, request: Request, codec: TextCodec | None) -> Generator[Delta, None, None]:
    """Submits a request at once, and yields what each step adds to its output. Closing the generator frees
    the request, also before its first value. Raises what `submit` refuses, or the error that the request
    ended with.
    """
    inbox: queue.SimpleQueue[Sequence[Output]] = queue.SimpleQueue()
    requests.submit(request, inbox.put)
    follow = _follow(requests, request, codec, inbox)
    next(follow)  # into its `try`: closing a generator that was never started runs nothing
    return follow


def _follow(
    requests: RequestQueue,
    request: Request,
    codec: TextCodec | None,
    inbox: queue.SimpleQueue[Sequence[Output]],
) -> Generator[Delta, None, None]:
    """Yields an empty delta, which `stream` takes, then the deltas of the outputs that `inbox` is given."""
    assembler = Assembler(request.stopping, codec)
    told_stop = False
    active = True
    try:
        yield Delta()
        while True:
            for output in inbox.get():
                active = not output.last
                delta = assembler.add(output)
                if assembler.stop is not None and active and not told_stop:
                    told_stop = True
                    requests.finish(request.request_id, assembler.stop)
                if delta.text or delta.token_ids or delta.finish is not None:
                    yield delta
                if output.last:
                    return
    finally:
        if active:  # else the id may be another request's by now
            requests.cancel(request.request_id)


def joined(request_id: str, deltas: Sequence[Delta]) -> Generation:
    """All deltas of a `stream` as one value."""
    finish, timing = deltas[-1].finish, deltas[-1].timing
    assert finish is not None, "a stream that raises nothing has an end"
    assert timing is not None, "an end has its timing"
    return Generation(
        request_id=request_id,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        finish=finish,
        timing=timing,
    )
