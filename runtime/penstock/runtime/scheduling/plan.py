"""What the scheduler tells the runner to compute in one step, and what comes back. No jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.runtime.requests.request import Request, TokenLogprobs


class PlanRow(NamedTuple):
    """One request's share of a step: positions [start, start + num_tokens).

    A named tuple because one is made per row and step: on Python 3.11 a frozen dataclass of as many fields
    takes 1.6 us to make, this 0.5 us.
    """

    request_id: str
    slot: int
    """The row the request keeps while it runs, 0 <= slot < max_num_seqs."""
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] | None
    """The input tokens; None = one token, the one this slot sampled last, which is on the device."""
    samples: bool
    """Whether the last position yields a token (false for a prefill chunk that is not the last)."""
    bans: int = 0
    """How many of this row's samples, from the first on, must be neither EOS (unless ignored) nor stop id:
    those are masked until min_tokens is reached. At most max_samples."""
    max_samples: int = 1
    """Most tokens this row may produce in this plan: 1 to `Plan.num_steps` where it samples, else without
    meaning. The device ends a row early, after a token that ends the request and is not banned."""


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Entries of slot's page table become `pages`, from `first_index` on."""

    slot: int
    first_index: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One dispatch: a step, or a window of several decode steps.

    Rows stand in no particular order that a caller may rely on; slots are unique.
    """

    step_id: int
    rows: tuple[PlanRow, ...]
    new_requests: tuple[tuple[int, Request], ...] = ()
    """(slot, request) of rows that (re)entered: the runner refreshes its mirror of their parameters."""
    page_writes: tuple[PageWrite, ...] = ()
    preempted: tuple[str, ...] = ()
    """Ids that lost their pages while this plan was made; never among `rows`."""
    num_steps: int = 1
    """Decode steps in one program: above 1 only where every row is a decode. Each later step's input is the
    row's sample of the one before; a row takes part while it has made fewer than max_samples tokens."""
    page_copies: tuple[tuple[int, int], ...] = ()
    """(source, destination): pages to copy before the step writes; no page is both."""
    made: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By slot, for those of `new_requests` whose penalties need it: the tokens they had made before."""
    feature_slots: Mapping[int, int] = field(default_factory=dict)
    """By slot, for those of `new_requests` with penalties or a bias: where these are kept while they run."""
    apart: bool = False
    """A step of rows under a constraint alone, between the windows of the others."""

    @property
    def num_tokens(self) -> int:
        """Input tokens of the (first) step."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_prompt_tokens(self) -> int:
        """Those of them that no decode has: tokens of prompts, or computed anew after a preemption."""
        return sum(row.num_tokens for row in self.rows if row.token_ids is not None)

    @property
    def decode_only(self) -> bool:
        return all(row.num_tokens == 1 for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens of a plan, aligned with `plan.rows`."""

    token_ids: Sequence[Sequence[int]]
    """Per row in the order they were sampled: none where the row does not sample, else 1 to max_samples."""
    logprobs: Sequence[Sequence[TokenLogprobs]]
    """Per row: empty, or one per token."""
    errors: Mapping[int, Exception] = field(default_factory=dict)
    """By row, where no more tokens can be made."""
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """By row, of the prompt's tokens at positions from start + 1 on, for requests that want it."""
