"""The scheduler's own, mutable view of an output. Only the scheduler changes it."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field

from penstock.runtime.requests.request import Request, RequestTiming
from penstock.runtime.scheduling.media.pool import Encoded
from penstock.runtime.scheduling.prompt_values import PromptValues
from penstock.runtime.scheduling.stopping import StopRules

NEVER = 2**63 - 1
"""A number of positions that no sequence reaches."""


def rank_of(seq: Sequence) -> tuple[int, int]:
    """The sort key for the order of service."""
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
    """The pages of a sequence in one group of layers (see `paging`)."""

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
    has_started: bool = False
    """Whether any output of its request has entered, and not all have ended since. Then this one may enter
    although no new request may."""
    status: Status = Status.WAITING
    slot: int | None = None
    feature_slot: int | None = None
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
    preemptions: int = 0
    recompute_until: int = 0
    """Positions below this were computed, or were being computed, before the sequence was preempted."""
    scheduled_ns: int = 0
    first_token_ns: int = 0
    cached_prompt_tokens: int = 0
    picture: Encoded | None = None
    """The picture of which a part of the tokens is computed; None if there is none."""
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
        self.of_prompt = PromptValues(self.request)

    @property
    def num_generated(self) -> int:
        """How many tokens were generated so far."""
        return len(self.token_ids) - self.num_prompt

    def forget_prompt_values(self) -> None:
        """Drops what is known of the prompt and was not handed out: it belongs to old weights, so the whole
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
        )
