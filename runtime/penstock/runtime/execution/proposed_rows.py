"""How a step computes the tokens that are proposed for its rows: as rows of one token, of the same slot.

Attention writes the keys and values of a step before it reads any, so each of these rows attends to those
before it; and a row's result depends on no other row, so it is what a decode step would give, to the bit.
They come behind the plan's own rows, which keep their numbers. `make_checked_choice` finds out which count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.scheduling.plan import FIRST_DRAFTED, Plan, PlanRow

CHECKS = 3
BEFORE, PLACE, GUESS = range(CHECKS)
"""What is said of each row, see `pack_checks`."""

Further = Mapping[int, range]
"""Row of a plan to the rows, behind those of the plan, that compute what is proposed for it."""


def spread(plan: Plan) -> tuple[Plan, Further]:
    """Return a plan in which each proposed token has a row of its own, and where these rows are."""
    if not plan.proposer:
        return plan, {}
    rows, behind = list(plan.rows), list[PlanRow]()
    further: dict[int, range] = {}
    for i, row in enumerate(plan.rows):
        if row.proposed:
            first = len(rows) + len(behind)
            further[i] = range(first, first + len(row.proposed))
            alone = row._replace(num_tokens=1, max_samples=1, proposed=())
            rows[i] = alone._replace(bans=min(row.bans, 1))
            behind += [
                alone._replace(start=row.start + place, token_ids=(token,), bans=int(place < row.bans))
                for place, token in enumerate(row.proposed, 1)
            ]
    return dataclasses.replace(plan, rows=(*rows, *behind)), further


def asking_the_draft(plan: Plan) -> Plan | None:
    """Return a plan of the rows for which a draft model guesses in this plan, each with its slot's last
    sample as its input, and the number of guesses as its max_samples; None where it guesses nothing.
    """
    rows = tuple(
        row._replace(num_tokens=1, proposed=(), max_samples=len(row.proposed), bans=0)
        for row in plan.rows
        if row.proposed and row.proposed[0] == FIRST_DRAFTED
    )
    if not rows:
        return None
    num_steps = max(row.max_samples for row in rows)
    return Plan(plan.step_id, rows, page_writes=plan.page_writes, num_steps=num_steps)


def pack_checks(rows: Sequence[PlanRow], further: Further, num_rows: int) -> NDArray[np.int32]:
    """Pack what has to be checked in a step of so many rows, int32[CHECKS, R]: for each row of a proposed
    token the row before it, its place in the proposal from 1 on, and the token. A row that is always right
    has itself, 0 and 0. `rows` are those of the plan before `spread`.
    """
    checks = np.zeros((CHECKS, num_rows), np.int32)
    checks[BEFORE] = np.arange(num_rows)
    for i, places in further.items():
        at = slice(places.start, places.stop)
        checks[BEFORE, at] = (i, *places[:-1])
        checks[PLACE, at] = np.arange(1, len(places) + 1)
        checks[GUESS, at] = rows[i].proposed
    return checks
