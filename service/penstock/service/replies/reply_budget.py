"""How many bytes of replies may wait in memory, of one request and of all.

What counts is what was made and not sent yet: all that a Generate has so far, and what a stream's reader has
not taken. How much a request will make is known to nobody beforehand, except where it names `max_tokens`; so
requests that could not fit even alone are refused, and all others are counted while they run.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.runtime.errors import Violation
from penstock.runtime.generation.jobs import Job
from penstock.service.errors import Busy, ResponseTooLarge
from penstock.service.replies.reply_limits import ReplyLimits

_FULL = 0.75
"""From this share of the budget on no new request is taken: the rest is for those that run."""
_RETRY_S = 1.0
_TOKEN_BYTES = 7
"""Of a token: its id, and some characters."""
ID_BYTES = 3
"""Of a token id on the wire, below 2^21."""
_SAMPLED_BYTES = 8
"""Of the log-probability of the token itself, and of the list of its candidates."""
_CANDIDATE_BYTES = 11
BUFFERED_BYTES = "max_buffered_response_bytes"


def logprobs_bytes(num_tokens: int, top: int) -> int:
    """About the size of the log-probabilities of so many tokens, with `top` candidates each."""
    return num_tokens * (_SAMPLED_BYTES + _CANDIDATE_BYTES * top)


class ReplyBudget:
    """The bytes of one server. Used on the event loop only."""

    def __init__(self, limits: ReplyLimits) -> None:
        self.most_of_one, self.most = limits.max_response_bytes, limits.max_buffered_response_bytes
        self.used = 0
        self._shares: set[Share] = set()

    def check_job(self, job: Job, max_model_len: int) -> None:
        """ResponseTooLarge where a collected reply of as many tokens as the request asks for could not be
        sent.

        A request that names no limit may make as little as it likes, so it is not refused for what it could
        make.
        """
        if job.stopping.max_tokens is None:
            return
        tokens = job.n * min(job.stopping.max_tokens, max_model_len)
        size = tokens * _TOKEN_BYTES + (0 if job.logprobs is None else logprobs_bytes(tokens, job.logprobs))
        if size > self.most_of_one:
            fields = ["stopping.max_tokens", *(["sampling.n"] if job.n > 1 else [])]
            if job.logprobs is not None:
                fields.append("output.logprobs")
            raise self._too_large(fields, f"could make a reply of about {size} bytes")

    def check_prompt(self, num_tokens: int, top: int) -> None:
        """ResponseTooLarge where the log-probabilities of such a prompt could not be sent: they are one
        message.
        """
        size = logprobs_bytes(num_tokens, top)
        if size > self.most_of_one:
            raise self._too_large(["output.prompt_logprobs"], f"makes a message of about {size} bytes")

    def _too_large(self, fields: list[str], what: str) -> ResponseTooLarge:
        text = f"{what}; this server sends at most {self.most_of_one}"
        return ResponseTooLarge([Violation(field, text) for field in fields], self.most_of_one)

    def check_room(self) -> None:
        """Busy where too much waits already for a new request."""
        if self.used > self.most * _FULL:
            raise Busy(BUFFERED_BYTES, self.most, _RETRY_S)

    def share(self, fail: Callable[[Exception], None]) -> Share:
        """A request's part, to be closed at its end. `fail` is called with why it is ended: its own part is
        too large, or that of all is and none that still runs has more than it.
        """
        share = Share(self, fail)
        self._shares.add(share)
        return share

    def hold(self, num_bytes: int) -> Share:
        """The part of a reply of at most about so many bytes, which is made at once; to be closed when it was
        sent. Raises Busy where too much waits already.
        """
        self.check_room()
        share = self.share(lambda error: None)  # never called, for there is nothing that could be ended
        share.seal()
        share.add(num_bytes)
        return share

    def check_ids(self, field: str, num_tokens: int) -> None:
        """ResponseTooLarge where a reply of so many token ids, of this field, could not be sent."""
        size = ID_BYTES * num_tokens
        if size > self.most_of_one:
            raise self._too_large([field], f"makes a reply of about {size} bytes")

    @property
    def num_shares(self) -> int:
        """Of requests that have not ended."""
        return len(self._shares)

    def changed(self, share: Share, num_bytes: int) -> None:
        """Of a share: it has grown by so many bytes."""
        self.used += num_bytes
        if num_bytes <= 0 or share.is_sealed:
            return
        if share.num_bytes > self.most_of_one:
            text = f"more than {self.most_of_one} bytes of the reply wait to be sent"
            wrong = [Violation("output", f"{text}; ask for less, or read faster")]
            share.fail(ResponseTooLarge(wrong, self.most_of_one))
        elif self.used > self.most:
            running = (one for one in self._shares if not one.is_sealed)  # this share is one of them
            max(running, key=lambda one: one.num_bytes).fail(Busy(BUFFERED_BYTES, self.most, _RETRY_S))

    def closed(self, share: Share) -> None:
        """Of a share: it has nothing, and will have nothing."""
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
        """So many more wait, or fewer, if it is negative. May end this request or another."""
        if self._is_open:
            self.num_bytes += num_bytes
            self._budget.changed(self, num_bytes)

    def seal(self) -> None:
        """All of it is made, and is being sent: to end the request would give no bytes back, so from now on
        it is not chosen for that.
        """
        self.is_sealed = True

    def close(self) -> None:
        """Nothing of it waits any more. May be called twice."""
        self.add(-self.num_bytes)
        self._is_open = False
        self._budget.closed(self)
