"""What each request used, told once, in one place, however it ended.

The interceptor makes a `Meter` for each RPC that a key's rates count, and ends it with the RPC; what
generates tells it of tokens as they are used. So a request is counted also where its client vanished midway,
and a refusal is counted too. Whoever keeps the books implements `UsageSink`.
"""

from __future__ import annotations

import asyncio
import enum
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from penstock.service.access.callers import ANYBODY, Caller
from penstock.service.access.rates import Account


class Outcome(enum.Enum):
    """How a request ended."""

    ANSWERED = "answered"
    """With OK; also where its outputs were aborted."""
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
    """Such as "penstock.v1.InferenceService/Generate"."""
    request_id: str
    """The caller's own; empty where it was refused before it was read."""
    outcome: Outcome
    reason: str = ""
    """Of the error, such as "RATE_LIMITED"."""
    prompt_tokens: int = 0
    """Of the prompt as the model saw it, once for all outputs."""
    cached_prompt_tokens: int = 0
    """Of those, how many were found in the prefix cache; 0 where no output came to its end."""
    completion_tokens: int = 0
    """Made for all outputs, also those that nobody read."""


class UsageSink(Protocol):
    """Keeps the books."""

    def record(self, usage: Usage) -> asyncio.Future[None] | None:
        """Take note of a request. Called once for each, on the event loop: must neither block nor raise.

        What it returns is done once the note would outlive a crash; None: there is nothing to wait for. The
        last message of an answer leaves after that. Nobody waits where there is no answer.
        """
        ...


class Meter:
    """Counts what one RPC uses, against the rates of its caller, and tells the sink in the end."""

    def __init__(
        self,
        caller: Caller = ANYBODY,
        method: str = "",
        account: Account | None = None,
        sink: UsageSink | None = None,
    ) -> None:
        self._caller = caller
        self._method = method
        self._account = account
        self._sink = sink
        self._request_id = ""
        self._begun = False
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._made_tokens = 0
        self._ended = False

    def named(self, request_id: str) -> None:
        """The caller's id of the request is known."""
        self._request_id = request_id

    def began(self, prompt_tokens: int) -> None:
        """The engine took the request."""
        self._begun = True
        self._prompt_tokens = prompt_tokens
        self._use(prompt_tokens)

    def made(self, tokens: int) -> None:
        """So many tokens more, of any output."""
        self._made_tokens += tokens
        self._use(tokens)

    def cached(self, tokens: int) -> None:
        """So many of the prompt's were found in the cache."""
        self._cached_tokens = tokens

    async def answered(self) -> None:
        """The answer is whole: called before its last message leaves, which waits until this is noted."""
        noted = self._end(Outcome.ANSWERED, "")
        if noted is not None:
            await noted

    def failed(self, reason: str) -> None:
        """The RPC ends with an error of this reason. Without effect after `answered`."""
        self._end(Outcome.FAILED if self._begun else Outcome.REFUSED, reason)

    def vanished(self) -> None:
        """The client has gone, or its deadline has passed. Without effect after `answered`."""
        self._end(Outcome.VANISHED, "")

    def _use(self, tokens: int) -> None:
        if self._account is not None:
            self._account.use_tokens(tokens)

    def _end(self, outcome: Outcome, reason: str) -> asyncio.Future[None] | None:
        if self._ended:
            return None
        self._ended = True
        if self._sink is None:
            return None
        return self._sink.record(
            Usage(
                self._caller.id,
                self._method,
                self._request_id,
                outcome,
                reason,
                self._prompt_tokens,
                self._cached_tokens,
                self._made_tokens,
            )
        )


CURRENT_METER: ContextVar[Meter] = ContextVar("penstock_meter")
"""That of this task's RPC, where the interceptor has set one."""


def current_meter() -> Meter:
    """Outside of an RPC one that tells nobody."""
    return CURRENT_METER.get(None) or Meter()
