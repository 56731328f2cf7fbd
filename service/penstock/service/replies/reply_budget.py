"""Bounds how many bytes of replies may wait in memory, for one request and for all.

What counts is what was generated and not sent yet: all that a Generate has so far, and what a stream's reader
has not taken. Nobody knows beforehand how much a request will generate, unless it sets `max_tokens`. So a
request that could not fit even alone is refused, and all others are counted while they run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from penstock.runtime.errors import ConfigError, Violation
from penstock.runtime.prompting.jobs import Job
from penstock.service.errors import Busy, ResponseTooLarge

MIB = 1024 * 1024
_MOST = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyLimits:
    """Limits on replies, in bytes; each has a flag of the same name."""

    max_response_bytes: int = 64 * MIB
    """Bytes of one request that may wait: all that Generate collects, or what a stream's reader has not taken
    yet.
    """
    max_buffered_response_bytes: int = 1024 * MIB
    """Bytes of all requests together that may wait."""

    def __post_init__(self) -> None:
        bad = [
            f"{field.name}: must be from 1 to {_MOST}, not {value}"
            for field in dataclasses.fields(self)
            if not 1 <= (value := getattr(self, field.name)) <= _MOST
        ]
        if bad:
            raise ConfigError("; ".join(bad))


_FULL = 0.75
"""From this share of the budget on new requests are refused; the rest is for running ones."""
_RETRY_S = 1.0
_TOKEN_BYTES = 7
"""Bytes of a generated token: its id, and some characters."""
ID_BYTES = 3
"""Bytes of a token id on the wire, below 2^21."""
_SAMPLED_BYTES = 8
"""Bytes of a token's own log-probability, and of the list of its candidates."""
_CANDIDATE_BYTES = 11
_FLOAT_BYTES = 4
BUFFERED_BYTES = "max_buffered_response_bytes"


def logprobs_bytes(num_tokens: int, top: int) -> int:
    """Estimate the size of the log-probabilities of `num_tokens` tokens with `top` candidates each."""
    return num_tokens * (_SAMPLED_BYTES + _CANDIDATE_BYTES * top)


class ReplyBudget:
    """The bytes of one server. Used on the event loop only."""

    def __init__(self, limits: ReplyLimits) -> None:
        self.most_of_one, self.most = limits.max_response_bytes, limits.max_buffered_response_bytes
        self.used = 0
        self.merged = 0
        """How many deltas of streams were merged with one that still waited."""
        self._shares: set[Share] = set()

    def check_job(self, job: Job, max_model_len: int, hidden_size: int = 0) -> None:
        """Raise ResponseTooLarge if a collected reply with as many tokens as the request asks for could not
        be sent.

        A request without `max_tokens` may generate little, so it is not refused here.
        """
        if job.stopping.max_tokens is None:
            return
        tokens = job.n * min(job.stopping.max_tokens, max_model_len)
        size = tokens * _TOKEN_BYTES + (0 if job.logprobs is None else logprobs_bytes(tokens, job.logprobs))
        if job.hidden_states:
            size += tokens * _FLOAT_BYTES * hidden_size
        if size > self.most_of_one:
            fields = ["stopping.max_tokens", *(["sampling.n"] if job.n > 1 else [])]
            if job.logprobs is not None:
                fields.append("output.logprobs")
            if job.hidden_states:
                fields.append("output.hidden_states")
            raise self._too_large(fields, f"the reply could have about {size} bytes")

    def check_prompt(self, num_tokens: int, top: int) -> None:
        """Raise ResponseTooLarge if the log-probabilities of such a prompt, which are sent in one message,
        are too large.
        """
        size = logprobs_bytes(num_tokens, top)
        if size > self.most_of_one:
            raise self._too_large(["output.prompt_logprobs"], f"they have about {size} bytes")

    def check_vectors(self, num_vectors: int, dimensions: int) -> None:
        """Raise ResponseTooLarge if a reply of so many vectors could not be sent."""
        size = _FLOAT_BYTES * num_vectors * dimensions
        if size > self.most_of_one:
            raise self._too_large(["inputs"], f"the reply would have about {size} bytes")

    def _too_large(self, fields: list[str], what: str) -> ResponseTooLarge:
        text = f"{what}, and this server sends at most {self.most_of_one}; ask for less"
        return ResponseTooLarge([Violation(field, text) for field in fields], self.most_of_one)

    def check_room(self) -> None:
        """Raise Busy if too much waits already for a new request."""
        if self.used > self.most * _FULL:
            raise Busy(BUFFERED_BYTES, self.most, _RETRY_S)

    def share(self, fail: Callable[[Exception], None]) -> Share:
        """Make a request's share, which must be closed at its end. `fail` is called with the reason if the
        request must be ended: its share is too large, or all shares together are and it is the largest that
        is still running.
        """
        share = Share(self, fail)
        self._shares.add(share)
        return share

    def hold(self, num_bytes: int) -> Share:
        """Make the share of a reply of at most about `num_bytes` bytes that is made at once. It must be
        closed when the reply was sent. Raises Busy if too much waits already.
        """
        self.check_room()
        share = self.share(lambda error: None)  # never called, because there is nothing to end
        share.seal()
        share.add(num_bytes)
        return share

    def check_ids(self, field: str, num_tokens: int) -> None:
        """Raise ResponseTooLarge if a reply of so many token ids, for this field, could not be sent."""
        size = ID_BYTES * num_tokens
        if size > self.most_of_one:
            raise self._too_large([field], f"the reply would have about {size} bytes")

    @property
    def num_shares(self) -> int:
        """How many requests have not ended."""
        return len(self._shares)

    def changed(self, share: Share, num_bytes: int) -> None:
        """Note that a share, which calls this, has grown by `num_bytes` bytes."""
        self.used += num_bytes
        if num_bytes <= 0 or share.is_sealed:
            return
        if share.num_bytes > self.most_of_one:
            text = f"more than {self.most_of_one} bytes of the reply are waiting to be sent"
            wrong = [Violation("output", f"{text}; ask for less, or read faster")]
            share.fail(ResponseTooLarge(wrong, self.most_of_one))
        elif self.used > self.most:
            running = (one for one in self._shares if not one.is_sealed)  # this share is one of them
            max(running, key=lambda one: one.num_bytes).fail(Busy(BUFFERED_BYTES, self.most, _RETRY_S))

    def closed(self, share: Share) -> None:
        """Note that a share, which calls this, was closed."""
        self._shares.discard(share)


class Share:
    """The bytes of one request that wait."""

    __slots__ = ("_budget", "_is_open", "fail", "is_sealed", "num_bytes")

    def __init__(self, budget: ReplyBudget, fail: Callable[[Exception], None]) -> None:
        self._budget = budget
        self._is_open = True
        self.fail = fail
        self.is_sealed = False
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` more as waiting, or fewer if it is negative. May end this request or another."""
        if self._is_open:
            self.num_bytes += num_bytes
            self._budget.changed(self, num_bytes)

    def merged(self, num_deltas: int) -> None:
        """Count deltas that were merged with one that still waited."""
        self._budget.merged += num_deltas

    def seal(self) -> None:
        """Note that everything is generated and being sent. Ending the request would free nothing, so it is
        not chosen for that any more.
        """
        self.is_sealed = True

    def close(self) -> None:
        """Count nothing of it any more. May be called twice."""
        self.add(-self.num_bytes)
        self._is_open = False
        self._budget.closed(self)
