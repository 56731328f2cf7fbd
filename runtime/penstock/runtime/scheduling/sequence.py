"""The scheduler's own, mutable view of an output: its tokens, the values of its prompt, and when it ends.
Only the scheduler changes it. No jax.

Stop strings are not looked for here: the text layer finds them and ends the request by
`Scheduler.abort(reason=STOP)`.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.requests.constraint import ForesightedConstraint
from penstock.runtime.requests.request import (
    Finish,
    FinishReason,
    Pooling,
    Request,
    RequestTiming,
    TokenLogprobs,
)
from penstock.runtime.scheduling.image_pool import Encoded

NEVER_NS = 2**63 - 1
"""A deadline that no monotonic clock reaches. Comparing integers is faster than checking for None."""

NEVER = 2**63 - 1
"""A number of positions that no sequence reaches."""

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
        """Return the rules of a request that arrives at `now_ns`, monotonic ns."""
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

    def first_end(self, tokens: Items[int], num_before: int, now_ns: int) -> tuple[int, Finish | None]:
        """Return how many of these samples count, and why the request ends with the last of them; None if it
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
        """Return why the request ends with `token_id`, its `num_total`-th token (prompt included); None if
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


class PromptValues:
    """Gathers, chunk by chunk, what one request wants of its prompt.

    Every planned chunk is committed, in the order of the plans, also if the sequence is preempted meanwhile.
    So hidden states are pooled once for each position: a chunk that is computed again pools those that no
    chunk before it was planned to pool.
    """

    __slots__ = (
        "_count",
        "_is_first",
        "_logprobs",
        "_num_known",
        "_num_planned",
        "_num_prompt",
        "_pooled",
        "_pooling",
        "is_wanted",
    )

    def __init__(self, request: Request) -> None:
        reading = request.reading
        self._num_prompt = num_prompt = len(request.prompt_token_ids)
        self._pooling = None if reading is None else reading.pooling
        self.is_wanted = request.prompt_logprobs is not None or reading is not None
        """Whether anything is wanted of the prompt itself."""
        first = 1 if reading is None else reading.scores_from
        self._num_known = num_prompt - 1 if request.prompt_logprobs is None or first is None else first - 1
        """Below this position nothing is needed for the log-probabilities that are still wanted."""
        self._num_planned = num_prompt if self._pooling is None else 0
        """Below this position, hidden states are pooled already, or by chunks in flight."""
        if self._pooling is Pooling.LAST_TOKEN:
            self._num_planned = num_prompt - 1
        self._is_first = self._pooling is Pooling.FIRST_TOKEN
        is_mean = self._pooling is Pooling.MEAN and reading is not None and not reading.classes
        self._count = num_prompt if is_mean else 1
        self._logprobs: list[TokenLogprobs] = []
        self._pooled: NDArray[np.float64] | None = None

    @property
    def first_needed(self) -> int:
        """The first position that must be computed for what is wanted and not known yet; a position that no
        sequence reaches where all is known.
        """
        known = self._num_known if self._num_known < self._num_prompt - 1 else sys.maxsize
        return min(known, self._num_planned) if self._num_planned < self._num_prompt else known

    # -- log-probabilities --

    def add_logprobs(self, end: int, values: Items[TokenLogprobs]) -> None:
        """Take the log-probabilities that a chunk up to position `end` has given. A sequence that was
        preempted computes some of them again.
        """
        known = min(end, self._num_prompt - 1)
        if known > self._num_known:
            self._logprobs += values[self._num_known - known :]
            self._num_known = known

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Hand out the log-probabilities. All of them are known when the last chunk is committed."""
        taken, self._logprobs = tuple(self._logprobs), []
        return taken

    # -- the embedding --

    def plan_pooling(self, start: int, end: int) -> int | None:
        """Plan to pool hidden states of a chunk, the positions from `start` to `end`. Return how many of its
        first ones are left out; None if all are.
        """
        first = max(self._num_planned, start)
        if first >= end:
            return None
        self._num_planned = self._num_prompt if self._is_first else end
        return first - start

    def add_hidden(self, hidden: NDArray[np.float32]) -> None:
        """Take what a chunk has made of its hidden states, float32[E]: their sum or, with Pooling.MAX, the
        largest number of each channel.
        """
        if self._pooled is None:
            self._pooled = hidden.astype(np.float64)
        elif self._pooling is Pooling.MAX:
            self._pooled = np.maximum(self._pooled, hidden)
        else:
            self._pooled = self._pooled + hidden

    def pooled(self) -> NDArray[np.float32] | None:
        """Return the embedding, float32[E], once the last chunk is committed; None if none is wanted."""
        if self._pooling is None or self._pooled is None:
            return None
        pooled: NDArray[np.float32] = (self._pooled / self._count).astype(np.float32)
        return pooled


def rank_of(seq: Sequence) -> tuple[int, int]:
    """Return the sort key for the order of service."""
    return seq.rank


class Status(enum.Enum):
    WAITING = "waiting"
    """New, or preempted: it holds no slot and no pages."""
    RUNNING = "running"
    """Prefilled or decoding: it holds a slot and pages."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sharing:
    """What the prefix cache knows of a sequence. Only the prefix cache changes it."""

    keys: list[bytes]
    """The keys of the leading full pages: those of the prompt, and of later pages as they are needed."""
    num_published: int = 0
    """How many leading pages were offered to the prefix cache, or came from it."""
    is_shareable: bool = False
    """Whether forks may share the pages: the sequence runs, and the prefix cache was not flushed since it
    entered (new weights flush it)."""
    publish_at: int = NEVER
    """How many computed and known positions fill the next page to be published; NEVER if none will be."""


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of a sequence in one group of layers (see `pages`)."""

    pages: list[int]
    """Page i holds positions [i * page_size, (i + 1) * page_size). The first `num_dropped` are not held."""
    num_dropped: int = 0
    """Leading pages that were given back, or never held, because they are out of the sliding window of every
    later token."""

    @property
    def held(self) -> list[int]:
        """The pages that the sequence holds."""
        return self.pages[self.num_dropped :] if self.num_dropped else self.pages


@dataclass(slots=True, eq=False)
class Recurrence:
    """What a running sequence has to do with snapshots of recurrent state. Only `Snapshots` changes it."""

    begin: int = 0
    """The position at which the sequence began to compute."""
    source: int | None = None
    """The snapshot behind which it began, while it may have to begin there again."""
    branch: int = 0
    """With how many pages of others it could have begun, had there been a snapshot there."""
    for_forks: int | None = None
    """The snapshot behind which its forks will begin."""
    rolling: tuple[bytes, int] | None = None
    """Key and number of the snapshot that the sequence has written last for its own sake."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One output in the scheduler.

    Positions count from 0 over prompt and generated tokens alike. The KV of `num_computed` positions is
    written once every step dispatched so far has run. In decode the newest token, known or in flight, has no
    KV yet: num_computed is len(token_ids) + pending - 1.
    """

    request: Request
    token_ids: list[int]
    """The tokens of the prompt, then the generated ones."""
    num_prompt: int
    rules: StopRules
    arrived_ns: int
    sharing: Sharing
    recurrence: Recurrence = field(default_factory=Recurrence)

    order: int = -1
    """Number of arrival, given when the sequence is queued, and kept through preemptions."""
    rank: tuple[int, int] = (0, -1)
    """Order of service, smallest first: (0 or -priority, order)."""
    request_id: str = field(init=False)
    """The id in `request`, kept here because it is read for every row of every step."""
    bans_until: int = field(init=False)
    """A token that is sampled at an input position below this is one of the first min_tokens, so it must be
    neither EOS nor a stop id."""
    max_computed: int = field(init=False)
    """When this many positions are computed, the last token that the request may have is sampled. That token
    needs no KV."""
    needs_feature_slot: bool = field(init=False)
    """Whether the request has penalties or a bias. If so, the sequence holds a feature slot beside its slot
    while it runs."""
    is_constrained: bool = field(init=False)
    """Whether a constraint says before each token which tokens may follow."""
    is_single: bool = field(init=False)
    """Whether it makes one token a step, and so takes part in no window."""
    most_proposed: int | None = field(init=False)
    """Most tokens that may be proposed for it in a step; None: the engine's bound alone holds."""
    has_started: bool = False
    """Whether any output of its request has entered, and not all have ended since. Then this one may enter
    although no new request may."""
    status: Status = Status.WAITING
    slot: int | None = None
    turn: int = 0
    """The turn that it belongs to while it runs (`SchedulerConfig.num_turns`)."""
    feature_slot: int | None = None
    adapter_slot: int | None = None
    """The slot of its adapter while it runs; None if it has none."""
    tables: tuple[PageTable, ...] = ()
    """The page table in each group; none while it holds no pages."""
    covered: int = 0
    """How many positions have pages in every group."""
    num_computed: int = 0
    prefill_until: int = 0
    """Positions below this are computed (again) from `token_ids`; from here on each input is the slot's own
    last sample. Set to len(token_ids) when the sequence enters, so a prefill chunk of one token is never
    taken for a decode."""
    pending: int = 0
    """Upper bound on the tokens sampled by dispatched steps that are not committed yet."""
    put_offs: int = 0
    """How many times in a row the token was put off because the constraint's mask was not ready."""
    sits_out: int = 0
    """How many plans are made without this sequence, if any other has something to do."""
    forced: Items[int] = ()
    """The tokens that its constraint expects next, where tokens are proposed."""
    proposed_tokens: int = 0
    """How many tokens were proposed for it, and checked."""
    accepted_tokens: int = 0
    """How many of these became its tokens."""
    preemptions: int = 0
    recompute_until: int = 0
    """Positions below this were computed, or were being computed, before the sequence was preempted."""
    scheduled_ns: int = 0
    first_token_ns: int = 0
    cached_prompt_tokens: int = 0
    image: Encoded | None = None
    """The image of which a part of the tokens is computed; None if there is none."""
    of_prompt: PromptValues = field(init=False)
    """What is known of the log-probabilities or the embedding of the prompt."""

    awaits: Hashable | None = None
    """While it waits, the event before which it cannot enter (see `waiting`); None if it stands in line."""

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        # Input position p samples the token at p + 1, which is generated token number p + 2 - num_prompt.
        self.bans_until = self.num_prompt - 1 + self.rules.min_tokens
        self.max_computed = self.rules.total_limit - 1
        sampling = self.request.sampling
        self.needs_feature_slot = sampling.has_penalties or sampling.has_bias
        self.is_constrained = self.request.constraint is not None
        self.is_single = self.is_constrained or self.request.hidden_states
        # A mask or a hidden state would be needed after each of the proposed tokens.
        constraint = self.request.constraint
        is_known_ahead = constraint is None or isinstance(constraint, ForesightedConstraint)
        may_propose = is_known_ahead and not self.request.hidden_states
        self.most_proposed = self.request.max_proposed_tokens if may_propose else 0
        self.of_prompt = PromptValues(self.request)

    @property
    def num_generated(self) -> int:
        """How many tokens were generated so far."""
        return len(self.token_ids) - self.num_prompt

    def forget_prompt_values(self) -> None:
        """Drop what is known of the prompt and was not handed out: it belongs to old weights, so the whole
        prompt is to be computed again.
        """
        if self.first_token_ns == 0:
            self.of_prompt = PromptValues(self.request)

    def timing(self, now_ns: int) -> RequestTiming:
        return RequestTiming(
            received_ns=self.request.received_ns or self.arrived_ns,
            arrived_ns=self.arrived_ns,
            scheduled_ns=self.scheduled_ns,
            first_token_ns=self.first_token_ns,
            finished_ns=now_ns,
            preemptions=self.preemptions,
            cached_prompt_tokens=self.cached_prompt_tokens,
            proposed_tokens=self.proposed_tokens,
            accepted_tokens=self.accepted_tokens,
        )
