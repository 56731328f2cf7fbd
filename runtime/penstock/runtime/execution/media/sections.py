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
    """Whether a row computes tokens of a prompt with pictures, whose positions are no sum."""
    return any(
        row.token_ids is not None
        and (request := request_of(row)).rotary is not None
        and row.start < len(request.prompt_token_ids)
        for row in plan.rows
    )


def fill_tokens(section: Ints, plan: Plan, request_of: RequestOf) -> None:
    """Fills the section of a step, int32[4, T]: the rotary positions of its tokens, and their rows of the
    pool, which is past its end before.
    """
    at, offsets = 0, []
    for row in plan.rows:
        offsets.append(at)
        section[:POSITIONS, at : at + row.num_tokens] = _positions(row, request_of(row))
        at += row.num_tokens
    for part in plan.pictures:
        begin = offsets[part.row] + part.at
        section[POSITIONS, begin : begin + part.num_tokens] = pool_rows(
            part.blocks, part.first, part.num_tokens
        )


def fill_rows(section: Ints, plan: Plan, request_of: RequestOf) -> None:
    """Fills the section of a window, int32[R]: what is added to the positions of each row."""
    rotaries = (request_of(row).rotary for row in plan.rows)
    section[: len(plan.rows)] = [0 if rotary is None else rotary.delta for rotary in rotaries]


def _positions(row: PlanRow, request: Request) -> Ints:
    """The rotary positions of a row's tokens, int32[3 or 1, num_tokens]."""
    rotary, end = request.rotary, row.start + row.num_tokens
    positions = np.arange(row.start, end, dtype=np.int32)[None]
    if rotary is None:
        return positions
    known = rotary.positions[:, row.start : end]
    if known.shape[1] == row.num_tokens:
        return known
    return np.concatenate([known, np.tile(positions[:, known.shape[1] :] + rotary.delta, (3, 1))], axis=1)


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
