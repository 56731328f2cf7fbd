"""What the scheduler tells the runner to compute in one step, as it is made and when it is done, and what the
runner answers. No jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.requests.adapter import AdapterWeights
from penstock.runtime.requests.images import MediaItem
from penstock.runtime.requests.request import Request, TokenLogprobs
from penstock.runtime.scheduling.sequence import Sequence

FIRST_DRAFTED = -2
"""A proposed token that stands for a draft model's guess of the next one; `FIRST_DRAFTED - i` stands for its
guess of the i-th after that. What they are is known on the device alone."""


def drafted_tokens(count: int) -> tuple[int, ...]:
    """Return what stands for the first `count` guesses of a draft model."""
    return tuple(range(FIRST_DRAFTED, FIRST_DRAFTED - count, -1))


class PlanRow(NamedTuple):
    """The part of one sequence in a step: its positions [start, start + num_tokens).

    It is a named tuple because one is made for every row of every step: on Python 3.11 this takes 0.5 us, a
    frozen dataclass of as many fields 1.6 us.
    """

    request_id: str
    slot: int
    """The place that the sequence has on the device while it runs, 0 <= slot < max_num_seqs."""
    start: int
    """Position of the row's first input token."""
    num_tokens: int
    """Number of input tokens, with those of `proposed`."""
    token_ids: tuple[int, ...] | None
    """The input tokens; None: one token, the slot's own last sample, which is on the device, and then those
    of `proposed`."""
    samples: bool
    """Whether the row samples a token after its last position; false for a prefill chunk that is not the
    last."""
    bans: int = 0
    """How many of this row's samples, from the first on, must be neither EOS (unless ignored) nor a stop id,
    because min_tokens is not reached yet; at most max_samples."""
    max_samples: int = 1
    """Most tokens this row may sample in this plan, 1 to `Plan.num_steps`, or one more than are proposed;
    without meaning if the row does not sample. The device ends a row early, after a token that ends the
    request and is not banned, or before the first sample that follows a token which was wrongly proposed."""
    proposed: tuple[int, ...] = ()
    """Inputs behind the slot's last sample that somebody has guessed, or what `drafted_tokens` gives, if a
    draft model guesses them in the same step. A token is sampled after each of them and of the last sample.
    Those count up to the first that is not the input which follows it: so what is sampled does not depend on
    what is proposed. The others leave KV behind the row's last token that counts, where the next row of the
    sequence writes its own."""


@dataclass(frozen=True, slots=True)
class PageWrite:
    """The entries of one of a slot's page tables from `first_index` on become `pages`."""

    slot: int
    first_index: int
    pages: tuple[int, ...]
    group: int = 0
    """The group of layers whose page table this is."""


class PageCopy(NamedTuple):
    """A page of one group of layers whose content another one gets before a step writes."""

    source: int
    destination: int
    group: int = 0


class SnapshotUse(NamedTuple):
    """What a row does with the snapshots of state."""

    source: int = -1
    """The snapshot whose state the row goes on from; -1: it begins at position 0, or goes on with the state
    of its slot."""
    cut: int = 0
    """The state after so many of the row's tokens is kept as a snapshot; 0: none is."""
    cut_to: int = 0
    """The snapshot that this state becomes; without meaning if `cut` is 0."""


NO_SNAPSHOT_USE = SnapshotUse()


class Encode(NamedTuple):
    """An image that is encoded before the rows of a step are computed."""

    item: MediaItem
    blocks: tuple[int, ...]
    """The blocks of the pool that its embeddings are written to, see `image_pool`."""


class ImageRows(NamedTuple):
    """Tokens of a row that are an image's."""

    row: int
    """Number of the row in the plan."""
    at: int
    """Which of the row's tokens is the first of these."""
    num_tokens: int
    first: int
    """Which token of the image that one is."""
    item: MediaItem
    blocks: tuple[int, ...]
    """The blocks of the pool that hold all embeddings of the image."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One dispatch: a step, or a window of several decode steps.

    The rows are in no particular order; their slots are unique.
    """

    step_id: int
    rows: tuple[PlanRow, ...]
    _: KW_ONLY
    new_requests: tuple[tuple[int, Request], ...] = ()
    """(slot, request) of each row that entered: the runner takes its parameters into the slot."""
    page_writes: tuple[PageWrite, ...] = ()
    """New entries of page tables."""
    preempted: tuple[str, ...] = ()
    """Ids of the sequences that lost their pages while this plan was made; they have no row in it."""
    num_steps: int = 1
    """Decode steps of the dispatch; above 1 only if every row is a decode. The input of each later step is
    the row's sample of the step before. A row takes part while it has made fewer than max_samples tokens."""
    page_copies: tuple[PageCopy, ...] = ()
    """Pages to copy before the step writes: as many in one group as in any other. No page is both a source
    and a destination."""
    generated_before: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Slot to the tokens that the request had generated before it entered, for those of `new_requests` whose
    penalties need them."""
    feature_slots: Mapping[int, int] = field(default_factory=dict)
    """Slot to feature slot, for those of `new_requests` with penalties or a bias."""
    snapshots: Mapping[int, SnapshotUse] = field(default_factory=dict)
    """Row to what it does with the snapshots of state, for rows that do anything with them. No snapshot is
    read and written in one plan."""
    apart: bool = False
    """Whether this is a step of rows that take part in no window, between windows of the others."""
    encodes: tuple[Encode, ...] = ()
    """The images to encode before the rows are computed."""
    images: tuple[ImageRows, ...] = ()
    """The tokens of the rows that stand for images."""
    adapter_loads: tuple[tuple[int, AdapterWeights], ...] = ()
    """(slot of adapters, adapter): the adapters to write before the step."""
    adapter_slots: Mapping[int, int] = field(default_factory=dict)
    """Slot to slot of its adapter, for those of `new_requests` that have one."""
    pooled: Mapping[int, int] = field(default_factory=dict)
    """Row to the first of its tokens, counted from the row's first one, from which on their hidden states are
    to be pooled; none for rows whose request does not pool. They are added up; with Pooling.MAX the largest
    number of each channel is taken, and with FIRST_TOKEN the first one alone."""
    proposer: str = ""
    """Who proposed tokens for rows of this plan; empty where none are proposed. `num_steps` is 1 if any are.
    """
    reads_text: bool = False
    """Whether the device guesses tokens by a text in this window, see `text_windows`."""

    @property
    def num_tokens(self) -> int:
        """Input tokens of the dispatch's first step."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_prompt_tokens(self) -> int:
        """Input tokens of rows that are no decodes: tokens of prompts, or tokens computed again after a
        preemption.
        """
        return sum(row.num_tokens for row in self.rows if row.token_ids is not None)

    @property
    def decode_only(self) -> bool:
        """Whether every row has one input token."""
        return all(row.num_tokens == 1 for row in self.rows)


class Guesses(NamedTuple):
    """The guesses of one step of a window for a row."""

    proposed: int
    accepted: int


def guesses_of(guessed: Items[int]) -> list[Guesses]:
    """Return the guesses of each step that made some of a row's tokens, by `StepResult.guessed` of these."""
    found: list[Guesses] = []
    for count in guessed:
        if count < 0:
            proposed, accepted = found[-1]
            found[-1] = Guesses(proposed, accepted + 1)
        else:
            found.append(Guesses(count, 0))
    return found


class Speculated(NamedTuple):
    """The tokens that one proposer proposed for the rows of a step, counted by their place in a proposal."""

    proposer: str
    """The proposer's name: a value of `EngineConfig.speculation`."""
    proposed: tuple[int, ...]
    """For each place, how many rows had a token proposed there that the model checked."""
    accepted: tuple[int, ...]
    """How many of these became tokens of their outputs; as long as `proposed`."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan's rows sampled; the sequences are aligned with `plan.rows`."""

    token_ids: Items[Items[int]]
    """For each row its tokens, in the order they were sampled: none if the row does not sample, else 1 to
    max_samples."""
    logprobs: Items[Items[TokenLogprobs]]
    """For each row one entry per token, or none at all."""
    _: KW_ONLY
    errors: Mapping[int, Exception] = field(default_factory=dict)
    """Row to error, for rows that can make no more tokens."""
    prompt_logprobs: Mapping[int, Items[TokenLogprobs]] = field(default_factory=dict)
    """Row to the log-probabilities of the prompt's tokens at positions from start + 1 on, for requests that
    want them."""
    hidden: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    """Row to hidden states, float32[E]: what those of `Plan.pooled` were pooled to, or, for requests that
    want it, the one from which the row's token was chosen."""
    guessed: Items[Items[int]] = ()
    """For each row one entry per token, of a window that guesses: negative where the token was guessed
    rightly, else how many tokens were guessed to follow it. Empty for other plans."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """The limits of the next plan, and what has been put into it so far. `Plan` explains the fields that it
    has too.
    """

    in_flight: bool
    """Whether an earlier plan is not committed yet."""
    admit: bool
    """Whether requests may start."""
    now_ns: int
    prefill_budget: int | None = None
    """Most prompt tokens beside decodes; None: the token budget is the only bound."""
    max_chunk: int | None = None
    """Most prompt tokens of one request; None: the token budget is the only bound."""
    apart_steps: int = 0
    """Rows that take part in no window get a step of their own after this many decode steps of the others; 0:
    all rows step together."""
    num_steps: int = 1
    """Decode steps of the plan."""
    turn: int | None = None
    """Only the running sequences of this turn have a row (`SchedulerConfig.num_turns`), beside those that
    enter; None: all have."""
    single_rows: bool | None = None
    """True: only rows that never take part in windows do; False: only the other rows do; None: all do."""
    proposed: Mapping[Sequence, tuple[int, ...]] = field(default_factory=dict)
    """What is proposed for the rows of decodes, for those for which anything is."""
    proposer: str = ""
    """See `Plan.proposer`."""
    reads_text: bool = False
    """See `Plan.reads_text`."""

    rows: list[PlanRow] = field(default_factory=list)
    sampling: list[Sequence | None] = field(default_factory=list)
    """For each row, the sequence that it samples a token for; None where it samples none."""
    writes: list[PageWrite] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    entered: list[tuple[int, Request]] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    sat_out: list[Sequence] = field(default_factory=list)
    """The sequences that were left out of this plan because of `Sequence.sits_out`."""
    chunked: set[Sequence] = field(default_factory=set)
    """The sequences that have a prefill row in this plan."""
    generated_before: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """See `Plan.generated_before`."""
    feature_slots: dict[int, int] = field(default_factory=dict)
    """See `Plan.feature_slots`."""
    snapshots: dict[int, SnapshotUse] = field(default_factory=dict)
    """See `Plan.snapshots`."""
    adapter_loads: list[tuple[int, AdapterWeights]] = field(default_factory=list)
    """See `Plan.adapter_loads`."""
    adapter_slots: dict[int, int] = field(default_factory=dict)
    """See `Plan.adapter_slots`."""
    prompts: dict[int, Sequence] = field(default_factory=dict)
    """Row to sequence, for the rows from whose prompt tokens log-probabilities or an embedding are wanted."""
    pooled: dict[int, int] = field(default_factory=dict)
    """See `Plan.pooled`."""
    encodes: list[Encode] = field(default_factory=list)
    images: list[ImageRows] = field(default_factory=list)

    def plan(self, step_id: int) -> Plan:
        """Return the finished plan."""
        return Plan(
            step_id=step_id,
            rows=tuple(self.rows),
            new_requests=tuple(self.entered),
            page_writes=tuple(self.writes),
            preempted=tuple(self.preempted),
            num_steps=self.num_steps,
            page_copies=tuple(self.copies),
            generated_before=self.generated_before,
            feature_slots=self.feature_slots,
            snapshots=self.snapshots,
            apart=self.single_rows is True,
            encodes=tuple(self.encodes),
            images=tuple(self.images),
            adapter_loads=tuple(self.adapter_loads),
            adapter_slots=self.adapter_slots,
            pooled=self.pooled,
            proposer=self.proposer,
            reads_text=self.reads_text,
        )
