"""Log-probabilities of the prompts' own tokens, which a step with chunks of them computes where they are
asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.execution.slots import Slots
from penstock.runtime.ops.sampler import read_logprobs
from penstock.runtime.requests.request import TokenLogprobs
from penstock.runtime.scheduling.plan import Plan


class PromptSlice(NamedTuple):
    """The part of the result that belongs to one row."""

    first: int
    """The row's first entry."""
    num_entries: int
    """How many entries it has."""
    num_top: int
    """How many likeliest tokens it wants of each."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log-probabilities of prompt tokens that one step computes."""

    values: jax.Array
    """int32[most tokens of a step, 1 + 2 * num_top], on its way to the host; see `read_logprobs`."""
    rows: Mapping[int, PromptSlice]

    def read(self, num_top: int) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Map rows to log-probabilities. Block until the values are on the host."""
        values = np.asarray(self.values)
        return {
            row: tuple(
                read_logprobs(values[i], num_top, part.num_top)
                for i in range(part.first, part.first + part.num_entries)
            )
            for row, part in self.rows.items()
        }


def prompt_targets(plan: Plan, slots: Slots) -> dict[int, tuple[int, ...]]:
    """Map rows to the prompt tokens that come after this step's tokens and whose log-probabilities are
    wanted.
    """
    targets: dict[int, tuple[int, ...]] = {}
    for i, row in enumerate(plan.rows):
        if row.token_ids is None:
            continue
        request = slots.request(row)
        if request.prompt_logprobs is not None:
            first = 1 if request.reading is None else request.reading.scores_from or 1
            first = max(row.start + 1, first)
            tokens = request.prompt_token_ids[first : row.start + row.num_tokens + 1]
            if tokens:
                targets[i] = tokens
    return targets


def compute(
    plan: Plan,
    slots: Slots,
    targets: Mapping[int, tuple[int, ...]],
    *,
    most_tokens: int,
    num_top: int,
    program: Callable[[NDArray[np.int32]], jax.Array],
) -> PromptLogprobs | None:
    """Dispatch the `program` for the rows that have `targets`; return None where there are none.
    `most_tokens`: of any step, the program's size; `num_top`: likeliest tokens that it reports.
    """
    if not targets:
        return None
    rows: dict[int, PromptSlice] = {}
    before: list[int] = []
    after: list[int] = []
    at = 0
    for i, row in enumerate(plan.rows):
        if i in targets:
            most = slots.request(row).prompt_logprobs or 0
            rows[i] = PromptSlice(len(before), len(targets[i]), min(most, num_top))
            end = min(row.start + row.num_tokens, len(slots.request(row).prompt_token_ids) - 1)
            before += range(at + end - row.start - len(targets[i]), at + end - row.start)
            after += targets[i]
        at += row.num_tokens
    values = program(prompt_buffer(before, after, most_tokens))
    values.copy_to_host_async()
    return PromptLogprobs(values, rows)


def prompt_buffer(before: Sequence[int], targets: Sequence[int], most_tokens: int) -> NDArray[np.int32]:
    """Make the argument of `make_prompt_logprobs`: the indices in the step of the tokens before, and the
    tokens after.
    """
    buffer = np.zeros(1 + 2 * most_tokens, np.int32)
    buffer[0] = len(before)
    buffer[1 : 1 + len(before)] = before
    buffer[1 + most_tokens : 1 + most_tokens + len(targets)] = targets
    return buffer
