"""The scheduler's own, mutable view of a request. Nobody outside the scheduler changes one."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field

from penstock.runtime.requests.request import Request, RequestTiming, TokenLogprobs
from penstock.runtime.scheduling.stopping import StopRules

NEVER = 2**63 - 1
"""A number of positions that no sequence reaches."""


def rank_of(seq: Sequence) -> tuple[int, int]:
    """For sorting."""
    return seq.rank


class Status(enum.Enum):
    WAITING = "waiting"
    """Holds no pages and no slot: new, or preempted."""
    RUNNING = "running"
    """Holds a slot and pages: prefilling or decoding."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the scheduler.

    Positions count from 0 over prompt and generated tokens alike. `num_computed` positions have their KV
    written once every step dispatched so far has run. In decode the newest token, known or in flight, has no
    KV yet: num_computed is len(token_ids) + pending - 1.
    """

    request: Request
    token_ids: list[int]
    """Prompt, then generated tokens."""
    num_prompt: int
    rules: StopRules
    arrived_ns: int
    page_keys: list[bytes]
    """The prefix cache's keys of the leading full pages: of the prompt's, and of more as they are needed."""

    order: int = -1
    """Arrival number, given when it is queued and kept through preemptions."""
    rank: tuple[int, int] = (0, -1)
    """The order in which sequences are served, smallest first: (0 or -priority, order)."""
    request_id: str = field(init=False)
    """Of `request`; kept here because it is read for every row of every step."""
    bans_until: int = field(init=False)
    """A token sampled at an input position below this is one of the first min_tokens: no EOS, no stop id."""
    max_computed: int = field(init=False)
    """When so many positions are computed, the last token it may have is sampled, which needs no KV."""
    needs_feature_slot: bool = field(init=False)
    """Whether it has penalties or a bias: while it runs it holds a feature slot beside its slot."""
    is_constrained: bool = field(init=False)
    """Whether the host says before each token which may follow."""
    status: Status = Status.WAITING
    slot: int | None = None
    feature_slot: int | None = None
    pages: list[int] = field(default_factory=list)
    """Page i holds positions [i * page_size, (i + 1) * page_size); the first `num_dropped` are not held."""
    num_dropped: int = 0
    """Leading pages given back because they are out of every later token's sliding window."""
    num_computed: int = 0
    prefill_until: int = 0
    """Positions below this are (re)computed from `token_ids`; from here on each input is the slot's own last
    sample. Set at entry to len(token_ids), so a prefill chunk of one token is never taken for a decode."""
    pending: int = 0
    """Upper bound on the tokens that dispatched steps sample for this sequence and that are not committed."""
    put_offs: int = 0
    """How often in a row its token was put off, because the constraint was not ready."""
    sits_out: int = 0
    """So many plans are made without it, if anybody else has something to do."""
    preemptions: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    cached_prompt_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they are known and not handed out."""
    num_prompt_logprobs: int = 0
    """How many of them were known so far."""

    published: int = 0
    """Leading pages that were offered to the prefix cache, or came from it."""
    is_shareable: bool = False
    """Whether forks may take its pages: it runs, and since it entered nobody flushed the prefix cache, as new
    weights do."""
    publish_at: int = NEVER
    """Computed and known positions that fill the next page to be published; NEVER if it publishes none."""
    awaits: Hashable | None = None
    """While it waits: the event before which it cannot enter (`waiting`); None if it stands in line."""

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        # Input position p samples the token at p + 1, which is generated token number p + 2 - num_prompt.
        self.bans_until = self.num_prompt - 1 + self.rules.min_tokens
        self.max_computed = self.rules.total_limit - 1
        sampling = self.request.sampling
        self.needs_feature_slot = sampling.has_penalties or sampling.has_bias
        self.is_constrained = self.request.constraint is not None

    @property
    def held_pages(self) -> list[int]:
        return self.pages[self.num_dropped :] if self.num_dropped else self.pages

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return self.request.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt - 1

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """All of them, which are known when the first token is."""
        taken, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return taken

    def forget_prompt_logprobs(self) -> None:
        """What is known of them and not handed out is void: the whole prompt is to be computed again."""
        if self.first_token_ns == 0:
            self.prompt_logprobs, self.num_prompt_logprobs = [], 0

    def timing(self, now_ns: int) -> RequestTiming:
        return RequestTiming(
            arrived_ns=self.arrived_ns,
            scheduled_ns=self.scheduled_ns,
            first_token_ns=self.first_token_ns,
            finished_ns=now_ns,
            preemptions=self.preemptions,
            cached_prompt_tokens=self.cached_prompt_tokens,
        )
