"""What a step's buffer says of pictures: the rotary positions of its tokens, and which of them have the
embedding of a picture.

A window of decode steps has neither a picture nor a prompt, so each of its rows has one number instead, which
is added to all its positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from penstock.runtime.execution.media.encoding import Pool, pool_rows
from penstock.runtime.models.layers.media import MediaInputs
from penstock.runtime.requests.request import Request
from penstock.runtime.scheduling.plan import Plan, PlanRow

Ints = NDArray[np.int32]
RequestOf = Callable[[PlanRow], Request]
POSITIONS = 3
"""Time, height and width."""


def needs_sections(plan: Plan, request_of: RequestOf) -> bool:
    """Whether a row computes tokens of a prompt with pictures: their embeddings may be those of a picture,
    and their positions are no sum.
    """
    return any(
        row.token_ids is not None
        and ((request := request_of(row)).media or request.rotary is not None)
        and row.start < len(request.prompt_token_ids)
        for row in plan.rows
    )


def shift_of(request: Request) -> int:
    """What is added to a position of a request, behind its prompt, for the rotary position."""
    return 0 if request.rotary is None else request.rotary.delta


def fill_tokens(
    section: Ints, plan: Plan, starts: Ints, nums: Ints, shifts: Ints, request_of: RequestOf
) -> None:
    """Fills the section of a step, int32[4, T]: the rotary positions of its tokens, and their rows of the
    pool, which is past its end before. Of each row of the plan: the first position and how many there are,
    and its `shift_of`, int32[rows].
    """
    ends = np.cumsum(nums)
    firsts = ends - nums
    section[:POSITIONS, : ends[-1]] = np.arange(ends[-1]) + np.repeat(starts + shifts - firsts, nums)
    for first, row in zip(firsts, plan.rows, strict=True):
        if row.token_ids is not None and (rotary := request_of(row).rotary) is not None:
            known = rotary.positions[:, row.start : row.start + row.num_tokens]
            section[:POSITIONS, first : first + known.shape[1]] = known
    for part in plan.pictures:
        begin = firsts[part.row] + part.at
        section[POSITIONS, begin : begin + part.num_tokens] = pool_rows(
            part.blocks, part.first, part.num_tokens
        )


def media_of_tokens(section: Array, pool: Pool) -> MediaInputs:
    """What a model is given of a step's section, inside the program."""
    return MediaInputs(section[:POSITIONS], section[POSITIONS], pool)


def media_of_rows(section: Array, positions: Array, token_rows: Array) -> MediaInputs:
    """What a model is given in a window: `positions` int32[T] count all tokens, `token_rows` int32[T] says
    which row a token belongs to.
    """
    shifted = positions + section[token_rows]
    return MediaInputs(jnp.tile(shifted[None], (POSITIONS, 1)), None, None)


def media_argument(media: MediaInputs | None) -> dict[str, Any]:
    """The argument of a model's call; a model that reads no pictures does not take it."""
    return {} if media is None else {"media": media}
