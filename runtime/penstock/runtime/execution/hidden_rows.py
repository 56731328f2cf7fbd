"""Hidden states that a step computes where they are asked for: pooled over parts of prompts, or those from
which tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.execution.slots import Slots
from penstock.runtime.requests.request import Pooling
from penstock.runtime.scheduling.plan import Plan

Parts = Mapping[int, tuple[int, int]]
"""Row to the tokens of the step whose hidden states are pooled for it: the first one, and the one behind the
last."""


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """The hidden states that one step computes for some of its rows."""

    values: jax.Array
    """float32[most rows of a step, E], on its way to the host: the sum of each row's part, or its maxima."""
    rows: tuple[int, ...]
    """The rows that have one, in the order of `values`."""
    num_classes: int = 0
    """How many numbers of a classifier come behind what each row's part was pooled to."""
    classified: frozenset[int] = frozenset()
    """The rows for which these are wanted, and not what was pooled."""

    def read(self) -> dict[int, NDArray[np.float32]]:
        """Map rows to values, float32[E] or float32[classes]. Block until they are on the host."""
        values = np.array(self.values)  # a copy: on CPU it would keep the device's array
        size = values.shape[1] - self.num_classes
        return {
            row: values[i, size:] if row in self.classified else values[i, :size]
            for i, row in enumerate(self.rows)
        }


def wanted(plan: Plan, slots: Slots) -> Parts:
    """Find the parts of this plan whose hidden states are asked for; none in most steps."""
    chosen = slots.want_hidden
    if not (chosen or plan.pooled):
        return {}
    parts: dict[int, tuple[int, int]] = {}
    at = 0
    for i, row in enumerate(plan.rows):
        end = at + row.num_tokens
        if i in plan.pooled:
            reading = slots.request(row).reading
            is_first = reading is not None and reading.pooling is Pooling.FIRST_TOKEN
            parts[i] = at + plan.pooled[i], at + 1 if is_first else end
        elif row.samples and row.slot in chosen:
            parts[i] = end - 1, end
        at = end
    return parts


def classified(plan: Plan, slots: Slots) -> frozenset[int]:
    """Find the rows of this plan whose classes are asked for."""
    readings = ((i, slots.request(plan.rows[i]).reading) for i in plan.pooled)
    return frozenset(i for i, reading in readings if reading is not None and reading.classes)


def with_maxima(plan: Plan, slots: Slots) -> frozenset[int]:
    """Find the rows of this plan of whose hidden states the largest numbers are asked for."""
    readings = ((i, slots.request(plan.rows[i]).reading) for i in plan.pooled)
    return frozenset(i for i, reading in readings if reading is not None and reading.pooling is Pooling.MAX)


def compute(
    parts: Parts,
    *,
    maxima: frozenset[int],
    most_tokens: int,
    most_rows: int,
    num_classes: int,
    classified: frozenset[int],
    program: Callable[[NDArray[np.int32]], jax.Array],
) -> HiddenRows | None:
    """Dispatch the `program` for these parts; return None where there are none. maxima: see `with_maxima`.
    most_tokens, most_rows: of any step, the program's sizes. The others are those of `HiddenRows`.
    """
    if not parts:
        return None
    values = program(sums_buffer(parts, maxima, most_tokens, most_rows))
    values.copy_to_host_async()
    return HiddenRows(values, tuple(parts), num_classes, classified)


def sums_buffer(parts: Parts, maxima: frozenset[int], most_tokens: int, most_rows: int) -> NDArray[np.int32]:
    """Make the argument of `make_hidden_sums`: the indices in the step of all tokens of the parts, and for
    each the part's index, and `most_rows` more where its maxima are wanted.
    """
    buffer = np.zeros(1 + 2 * most_tokens, np.int32)
    tokens, places = buffer[1 : 1 + most_tokens], buffer[1 + most_tokens :]
    count = 0
    for place, (row, (first, end)) in enumerate(parts.items()):
        until = count + end - first
        tokens[count:until] = np.arange(first, end)
        places[count:until] = place + most_rows if row in maxima else place
        count = until
    buffer[0] = count
    return buffer
