"""Decides when an output ends: one pure decision after each sampled token. No jax.

Stop strings are not decided here: the text layer finds them and ends the request by
`Scheduler.abort(reason=STOP)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.runtime.requests.request import Finish, FinishReason, Request

NEVER_NS = 2**63 - 1
"""A deadline that no monotonic clock reaches. Comparing integers is faster than checking for None."""

_LONGEST_LIMIT_S = 2.0**32
"""Over a century. A larger number of seconds might not convert to an integer of ns."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """What `StoppingParams` mean for one request on one engine; made once, by `Scheduler.prepare`."""

    eos_ids: frozenset[int]
    """The EOS ids; empty if the request ignores EOS."""
    end_ids: frozenset[int]
    """The EOS ids and the request's own stop ids."""
    min_tokens: int
    num_prompt: int
    max_total: int | None
    """Prompt tokens plus max_tokens; None without max_tokens."""
    context_limit: int
    """Most tokens, prompt and generated together, that this request may reach."""
    total_limit: int
    """The smaller of `max_total` and `context_limit`: below it neither of them ends the request."""
    deadline_ns: int

    @classmethod
    def of(
        cls, request: Request, *, eos_token_ids: frozenset[int], context_limit: int, now_ns: int
    ) -> StopRules:
        """The rules of a request that arrives at `now_ns`, monotonic ns."""
        stopping = request.stopping
        num_prompt = len(request.prompt_token_ids)
        eos_ids = frozenset() if stopping.ignore_eos else eos_token_ids
        max_total = None if stopping.max_tokens is None else num_prompt + stopping.max_tokens
        if request.reading is not None:
            max_total = num_prompt + 1  # no input follows the prompt
        limit_s = stopping.time_limit_s
        return cls(
            eos_ids=eos_ids,
            end_ids=eos_ids.union(stopping.stop_token_ids),
            min_tokens=stopping.min_tokens,
            num_prompt=num_prompt,
            max_total=max_total,
            context_limit=context_limit,
            total_limit=context_limit if max_total is None else min(max_total, context_limit),
            deadline_ns=NEVER_NS if limit_s is None else now_ns + int(min(limit_s, _LONGEST_LIMIT_S) * 1e9),
        )

    def first_end(self, tokens: Sequence[int], num_before: int, now_ns: int) -> tuple[int, Finish | None]:
        """Returns how many of these samples count, and why the request ends with the last of them; None if it
        goes on.

        The request had `num_before` tokens. The time limit is checked once, at the last sample, because all
        samples were made by then.
        """
        last = len(tokens) - 1
        for index, token in enumerate(tokens):
            finish = self.decide(token, num_before + index + 1, now_ns if index == last else 0)
            if finish is not None:
                return index + 1, finish
        return len(tokens), None

    def decide(self, token_id: int, num_total: int, now_ns: int) -> Finish | None:
        """Returns why the request ends with `token_id`, its `num_total`-th token (prompt included); None if
        it goes on.

        The reasons are checked in this order: EOS, STOP, MAX_TOKENS, CONTEXT_FULL, TIME_LIMIT. The token that
        ends the request counts as generated and is part of the output. With min_tokens = m, the first m
        generated tokens never end the request by EOS or STOP (the sampler also masks those ids); with
        max_tokens = n, the n-th always ends it.
        """
        if token_id in self.end_ids and num_total - self.num_prompt > self.min_tokens:
            reason = FinishReason.EOS if token_id in self.eos_ids else FinishReason.STOP
            return Finish(reason, token_id=token_id)
        if self.max_total is not None and num_total >= self.max_total:
            return Finish(FinishReason.MAX_TOKENS)
        if num_total >= self.context_limit:
            return Finish(FinishReason.CONTEXT_FULL)
        if now_ns >= self.deadline_ns:
            return Finish(FinishReason.TIME_LIMIT)
        return None
