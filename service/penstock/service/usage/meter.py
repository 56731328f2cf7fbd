"""Measures what each request used, and reports it once, in one place, however the request ended.

The interceptor makes a `Meter` for each RPC that counts against a key's rates, and ends it with the RPC. The
code that generates tells it of tokens as they are used. So a request is counted even if its client vanished
midway, and a refusal is counted, too. Whoever keeps the counts implements `UsageSink`.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from penstock.service.access.callers import ANYBODY, Caller
from penstock.service.access.rates import Account


class Outcome(enum.Enum):
    """How a request ended."""

    ANSWERED = "answered"
    """With OK, even if its outputs were aborted."""
    REFUSED = "refused"
    """With an error, before the engine took it. It used nothing."""
    FAILED = "failed"
    """With an error, after the engine took it."""
    VANISHED = "vanished"
    """Its client was gone, or its deadline had passed, before the end."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request used."""

    caller: str
    """The id of the key or certificate; empty on a server without keys."""
    method: str
    """A name such as "penstock.v1.InferenceService/Generate"."""
    request_id: str
    """The caller's own id of the request; empty if it was refused before its message was read."""
    outcome: Outcome
    reason: str = ""
    """The reason of the error, such as "RATE_LIMITED"."""
    prompt_tokens: int = 0
    """Tokens of the prompt as the model saw it, counted once for all outputs."""
    cached_prompt_tokens: int = 0
    """How many of them were found in the prefix cache; 0 if no output came to its end."""
    completion_tokens: int = 0
    """Tokens generated for all outputs, including those that were never read."""
    reasoning_tokens: int = 0
    """How many of those belong to the reasoning."""


@dataclass(frozen=True, slots=True)
class Course:
    """How one request went."""

    code: str
    """The name of the RPC's status, such as "OK"."""
    seconds: float
    """From the request's headers to its end."""
    first_token_s: float | None
    """Seconds from the headers to the first generated token of any output; None if there was none."""
    finish_reasons: tuple[str, ...]
    """Why each output ended, in their order; empty if not all have ended."""


class CallLog(Protocol):
    """Tells people how requests went."""

    def tell(self, usage: Usage, course: Course) -> bool:
        """Note a request. Called once for each, on the event loop, before the usage sink; it must neither
        block nor raise. Returns whether the log has something about this request.
        """
        ...


class UsageSink(Protocol):
    """Keeps the counts."""

    def record(self, usage: Usage) -> asyncio.Future[None] | None:
        """Record a request. Called once for each, on the event loop; it must neither block nor raise.

        The returned future is done once the record would survive a crash; None means that there is nothing to
        wait for. The last message of an answer leaves only after that. If there is no answer, nothing waits.
        """
        ...


class Meter:
    """Counts what one RPC uses, also against its caller's rates, and tells the sink at the end."""

    def __init__(
        self,
        caller: Caller = ANYBODY,
        method: str = "",
        account: Account | None = None,
        sink: UsageSink | None = None,
        call_log: CallLog | None = None,
    ) -> None:
        self._caller = caller
        self._method = method
        self._account = account
        self._sink = sink
        self._call_log = call_log
        self._began_s = time.monotonic()
        self._first_token_s: float | None = None
        self._finish_reasons: tuple[str, ...] = ()
        self._request_id = ""
        self._begun = False
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._made_tokens = 0
        self.reasoning_tokens = 0
        """Tokens so far that belong to the reasoning of any output."""
        self._ended = False
        self.is_logged = False
        """Whether the call log has something about this request."""

    def named(self, request_id: str) -> None:
        """Note the caller's id of the request."""
        self._request_id = request_id

    def began(self, prompt_tokens: int) -> None:
        """Note that the engine took the request, with a prompt of this many tokens."""
        self._begun = True
        self._prompt_tokens = prompt_tokens
        self._use(prompt_tokens)

    def made(self, tokens: int, reasoning: int = 0) -> None:
        """Count more generated tokens, of any output, and more tokens that are known to be reasoning."""
        self.reasoning_tokens += reasoning
        if self._first_token_s is None and tokens:
            self._first_token_s = time.monotonic() - self._began_s
        self._made_tokens += tokens
        self._use(tokens)

    def finished(self, finish_reasons: Iterable[str], cached_tokens: int) -> None:
        """Note that all outputs have ended, and how many of the prompt's tokens were found in the cache."""
        self._finish_reasons = tuple(finish_reasons)
        self._cached_tokens = cached_tokens

    async def answered(self) -> None:
        """Record that the answer is whole. Called before its last message leaves, which waits until this is
        recorded.
        """
        noted = self._end(Outcome.ANSWERED, "", "OK")
        if noted is not None:
            await noted

    def failed(self, reason: str, code: str) -> None:
        """Record that the RPC ends with an error of this reason, and with the status of this name. Has no
        effect after `answered`.
        """
        self._end(Outcome.FAILED if self._begun else Outcome.REFUSED, reason, code)

    def vanished(self, code: str) -> None:
        """Record that the client has gone, or that its deadline has passed: `code` is the name of the status
        that says which. Has no effect after `answered`.
        """
        self._end(Outcome.VANISHED, "", code)

    def _use(self, tokens: int) -> None:
        if self._account is not None:
            self._account.use_tokens(tokens)

    def _end(self, outcome: Outcome, reason: str, code: str) -> asyncio.Future[None] | None:
        if self._ended:
            return None
        self._ended = True
        if self._sink is None and self._call_log is None:
            return None
        usage = Usage(
            self._caller.id,
            self._method,
            self._request_id,
            outcome,
            reason,
            self._prompt_tokens,
            self._cached_tokens,
            self._made_tokens,
            self.reasoning_tokens,
        )
        if self._call_log is not None:
            seconds = time.monotonic() - self._began_s
            course = Course(code, seconds, self._first_token_s, self._finish_reasons)
            self.is_logged = self._call_log.tell(usage, course)
        return None if self._sink is None else self._sink.record(usage)


CURRENT_METER: ContextVar[Meter] = ContextVar("penstock_meter")
"""The meter of this task's RPC, if the interceptor has set one."""


def current_meter() -> Meter:
    """Return the meter of this task's RPC, or one that reports to nobody."""
    return CURRENT_METER.get(None) or Meter()
