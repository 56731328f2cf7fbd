"""One generation, the path that Generate and Stream share: tokenize, submit, take deltas, clean up."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Self

from penstock.runtime.assemble import Assembler, Delta
from penstock.runtime.chat.enforce import call_grammar, thinking_first
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.constraint import TokenConstraint
from penstock.runtime.grammar.spec import Grammar, GrammarKind
from penstock.runtime.outputs import outputs_of
from penstock.runtime.request import (
    Finish,
    Output,
    PreparedPrompt,
    Request,
    RequestTiming,
    TokenLogprobs,
)
from penstock.service.abort import Arrivals
from penstock.service.backend import Backend
from penstock.service.context import Fitted, Truncation, fit
from penstock.service.convert import ChatPrompt, Job
from penstock.service.convert_params import with_bad_words
from penstock.service.lanes import Lanes
from penstock.service.places import Places
from penstock.service.prompts import Encoded, encode_prompt, encode_words
from penstock.service.streams import Buffer, Switchboard, take_any
from penstock.service.telemetry import RequestTrace, Telemetry

INLINE_TOKENS = 2000
"""Shorter prompts are checked and hashed on the event loop, in a fraction of a millisecond."""


class Generation:
    """A request in the engine, as an async context: whatever happens, leaving it frees slots and pages."""

    def __init__(
        self,
        job: Job,
        engine: Backend,
        switchboard: Switchboard,
        telemetry: Telemetry,
        arrivals: Arrivals,
        places: Places,
        forms: ChatForms,
        lanes: Lanes,
        *,
        min_tokens: int = 1,
        stall_limit_s: float | None = None,
    ) -> None:
        self.job = job
        self.prompt = Fitted((), job.stopping)
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        """Known once the first delta of output 0 was taken."""
        self.num_completion_tokens = 0
        """Of all outputs taken so far."""
        self._engine = engine
        self._switchboard = switchboard
        self._arrivals = arrivals
        self._places = places
        self._placed = 0
        """Outputs that are in the engine."""
        self._forms = forms
        self._lanes = lanes
        self._min_tokens = min_tokens
        self._stall_limit_s = stall_limit_s
        self._trace: RequestTrace = telemetry.request(job, engine.info.name)
        self._buffers: list[Buffer] = []
        self._active: list[int] = []
        """Outputs whose end was not taken yet."""
        self._ends: dict[int, Delta] = {}

    async def __aenter__(self) -> Self:
        """Tokenize and submit; raises what the engine refuses."""
        try:
            with self._places.taken(self.job.n):
                requests, prepared, aborted, text = await self._prepare()
                # No `await` from here on: see Arrivals.
                changed = asyncio.Event()
                self._buffers = [self._buffer(request, text, changed) for request in requests]
                self._active = list(range(len(requests)))
                for request, buffer in zip(requests, self._buffers, strict=True):
                    if aborted is None:
                        buffer.submit(request, prepared)
                    else:
                        buffer.deliver(self._never_ran(request.request_id, aborted))
            self._placed = self.job.n
        except BaseException as error:
            self._end(error)
            raise
        return self

    async def _prepare(self) -> tuple[list[Request], PreparedPrompt | None, Finish | None, str]:
        """A request for each output, their prompt if it is long, how they were aborted meanwhile, if so, and
        a chat's text.
        """
        started_ns = time.monotonic_ns()
        job, room = self.job, self._engine.info.max_model_len
        rejects = job.context.truncation is Truncation.REJECT
        with self._arrivals.tokenizing(job.request_id) as arrival:
            encoded = await encode_prompt(
                self._engine.text, job.prompt, self._lanes, max_tokens=room - 1 if rejects else None
            )
            words = await encode_words(self._engine.text, job.bad_words, self._lanes)
            made = {"gen_ai.usage.input_tokens": len(encoded.token_ids)}
            self._trace.phase("tokenize", started_ns, time.monotonic_ns(), made)
            self.prompt = fit(encoded.token_ids, job.context, job.stopping, room)
            sampling = with_bad_words(job.sampling, words, self._engine.info.vocab_size)
            constraints = await self._constraints(encoded)
            requests = outputs_of(job.request(self.prompt, sampling), job.n, constraints)
            prepared = None
            if len(self.prompt.token_ids) > INLINE_TOKENS:
                prepared = await asyncio.to_thread(self._engine.prepare, requests[0])
        self._trace.started(len(self.prompt.token_ids))
        return requests, prepared, arrival.finish, encoded.text

    async def _constraints(self, encoded: Encoded) -> Sequence[TokenConstraint]:
        """One per output, where there is a grammar; compiled in a thread."""
        grammar, codec = self.job.grammar, self._engine.text
        if isinstance(self.job.prompt, ChatPrompt) and codec is not None:
            calls = call_grammar(self._forms, self.job.prompt.chat, encoded.text, codec.added_tokens)
            if calls is not None:
                grammar = Grammar(GrammarKind.EBNF, calls, "chat.tool_choice")
            elif grammar is not None:
                before = thinking_first(self._forms, encoded.text, codec.added_tokens)
                grammar = dataclasses.replace(grammar, before=before)
        if grammar is None:
            return ()
        compiler = self._engine.grammars
        assert compiler is not None, "conversion refuses grammars where there is no tokenizer"
        started_ns = time.monotonic_ns()
        compiled = await self._lanes.heavy(partial(compiler.compile, grammar))
        self._trace.phase("grammar", started_ns, time.monotonic_ns())
        return [compiled.constraint(grammar.field) for _ in range(self.job.n)]

    def _buffer(self, request: Request, text: str, changed: asyncio.Event) -> Buffer:
        job = self.job
        parser, visible = None, frozenset[str]()
        if isinstance(job.prompt, ChatPrompt) and job.options.text:
            parser = self._forms.parser(job.prompt.chat, text)
            visible = self._forms.markers(job.prompt.chat)
        assembler = Assembler(
            request.stopping,
            self._engine.text if job.options.text else None,
            skip_special_tokens=job.options.skip_special_tokens,
            parser=parser,
            visible=visible,
        )
        return Buffer(
            self._engine,
            self._switchboard,
            request.request_id,
            assembler,
            min_tokens=self._min_tokens,
            stall_limit_s=self._stall_limit_s,
            changed=changed,
        )

    def _never_ran(self, request_id: str, finish: Finish) -> Output:
        """What the engine says of a request that ends while it waits."""
        now_ns = time.monotonic_ns()
        timing = RequestTiming(
            arrived_ns=now_ns, scheduled_ns=0, first_token_ns=0, finished_ns=now_ns, preemptions=0
        )
        return Output(request_id, finish=finish, timing=timing, generation=self._engine.weights.generation)

    @property
    def is_done(self) -> bool:
        """Whether the end of every output was taken."""
        return not self._active

    async def take(self) -> tuple[int, Delta]:
        """The next delta of any output and its index; the last one of each has `finish`."""
        at, delta = await take_any([self._buffers[index] for index in self._active])
        index = self._active[at]
        self.num_completion_tokens += len(delta.token_ids)
        if delta.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        # The others go first the next time: a fast output must not keep a slow one waiting.
        self._active = [*self._active[at + 1 :], *self._active[: at + 1]]
        if delta.finish is not None:
            self._active.remove(index)
            self._ends[index] = delta
            if self.is_done:
                finishes = [end.finish for _, end in sorted(self._ends.items()) if end.finish is not None]
                self._trace.finished(finishes, self.timing, self.num_completion_tokens)
        return index, delta

    @property
    def timing(self) -> RequestTiming | None:
        """Of all outputs that have ended: from the first arrival to the last end."""
        return merged_timing([end.timing for end in self._ends.values() if end.timing is not None])

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._places.left(self._placed)
        self._trace.end(error, cancelled=isinstance(error, (asyncio.CancelledError, GeneratorExit)))


def merged_timing(times: Sequence[RequestTiming]) -> RequestTiming | None:
    """The earliest first token, the latest end; preemptions summed. Cached tokens are those of the output
    that was scheduled first: what the others found was made by it.
    """
    if not times:
        return None
    scheduled = [t for t in times if t.scheduled_ns]
    first = min(scheduled, key=lambda t: (t.scheduled_ns, t.cached_prompt_tokens), default=times[0])
    return RequestTiming(
        arrived_ns=min(t.arrived_ns for t in times),
        scheduled_ns=first.scheduled_ns,
        first_token_ns=min((t.first_token_ns for t in times if t.first_token_ns), default=0),
        finished_ns=max(t.finished_ns for t in times),
        preemptions=sum(t.preemptions for t in times),
        cached_prompt_tokens=first.cached_prompt_tokens,
    )
