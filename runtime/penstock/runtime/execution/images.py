"""The program that encodes images, how its calls are packed, and what a step's buffer says of images: the
rotary positions of its tokens, which of them have the embedding of an image, and, for a model whose images
are seen both ways, up to which position each token sees.

One program per bucket of patches takes an image and writes its embeddings into the pool: arrays of rows, one
row for each token of an image, in the blocks that the scheduler has chosen. A call takes one image only:
so the bits of its embeddings depend on nothing else, whatever is encoded in the same step.

A window of decode steps has neither an image nor a prompt, so each of its rows has one number instead, which
is added to all its positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from penstock.runtime.execution.buckets import geometric
from penstock.runtime.images.vision import Vision
from penstock.runtime.models.layers.images import MediaInputs
from penstock.runtime.requests.request import Request
from penstock.runtime.scheduling.image_pool import BLOCK_TOKENS
from penstock.runtime.scheduling.plan import Encode, Plan, PlanRow

Ints = NDArray[np.int32]
RequestOf = Callable[[PlanRow], Request]
Pool = tuple[Array, ...]
"""Embeddings of images, [rows, E] each: those that take the place of the tokens', and those of each layer
that gets some besides. Empty for a model that reads no images."""
POSITIONS = 3
"""Time, height and width."""
REACH = POSITIONS + 1
"""The row of a section that says up to which position a token sees, if it has one."""
FIRST_BUCKET = 256
"""Patches that the smallest program encodes, padding included."""


def needs_sections(plan: Plan, request_of: RequestOf) -> bool:
    """Say whether a row computes tokens of a prompt with images: their embeddings may be those of an
    image, and their positions are no sum.
    """
    return any(
        row.token_ids is not None
        and ((request := request_of(row)).media or request.rotary is not None)
        and row.start < len(request.prompt_token_ids)
        for row in plan.rows
    )


def shift_of(request: Request) -> int:
    """Return what is added to a position of a request, behind its prompt, for the rotary position."""
    return 0 if request.rotary is None else request.rotary.delta


def fill_tokens(
    section: Ints, plan: Plan, starts: Ints, nums: Ints, shifts: Ints, request_of: RequestOf
) -> None:
    """Fill the section of a step, int32[4 or 5, T]: the rotary positions of its tokens, their rows of the
    pool, which is past its end before, and perhaps the last position that each sees. Of each row of the plan:
    the first position and how many there are, and its `shift_of`, int32[rows].
    """
    ends = np.cumsum(nums)
    firsts = ends - nums
    section[:POSITIONS, : ends[-1]] = np.arange(ends[-1]) + np.repeat(starts + shifts - firsts, nums)
    sees_ahead = len(section) > REACH
    if sees_ahead:
        section[REACH, : ends[-1]] = np.arange(ends[-1]) + np.repeat(starts - firsts, nums)
    for first, row in zip(firsts, plan.rows, strict=True):
        if row.token_ids is not None and (rotary := request_of(row).rotary) is not None:
            known = rotary.positions[:, row.start : row.start + row.num_tokens]
            section[:POSITIONS, first : first + known.shape[1]] = known
    for part in plan.images:
        begin = firsts[part.row] + part.at
        rows = section[POSITIONS, begin : begin + part.num_tokens]
        embedded = part.item.are_embedded(part.first, part.num_tokens)
        rows[embedded] = pool_rows(part.blocks, part.first, part.num_tokens)[embedded]
        if sees_ahead:  # a chunk goes to the image's end
            section[REACH, begin : begin + part.num_tokens] = section[REACH, begin + part.num_tokens - 1]


def media_of_tokens(section: Array, pool: Pool, *, decode_only: bool) -> MediaInputs:
    """Make what a model is given of a step's section, inside the program. A row of one token sees nothing
    behind it.
    """
    reach = section[REACH] if len(section) > REACH and not decode_only else None
    return MediaInputs(section[:POSITIONS], section[POSITIONS], pool, reach)


def media_of_rows(section: Array, positions: Array, token_rows: Array) -> MediaInputs:
    """Make what a model is given in a window: `positions` int32[T] count all tokens, `token_rows` int32[T]
    says which row a token belongs to.
    """
    shifted = positions + section[token_rows]
    return MediaInputs(jnp.tile(shifted[None], (POSITIONS, 1)), None, None)


def media_argument(media: MediaInputs | None) -> dict[str, Any]:
    """Return the argument of a model's call; a model that reads no images does not take it."""
    return {} if media is None else {"media": media}


def encode_buckets(vision: Vision, max_tokens: int, growth: int) -> tuple[int, ...]:
    """Return the numbers of patches for which there are programs: each `growth` times the one before, up to
    those of an image of `max_tokens`; one number where all images have as many.
    """
    if vision.num_patches is not None:
        return (vision.num_patches,)
    per_token = vision.patches_per_token
    if vision.most_tokens is not None:
        max_tokens = min(max_tokens, vision.most_tokens)
    return geometric(-(-FIRST_BUCKET // per_token) * per_token, growth, max_tokens * per_token)


def make_encode(
    rebuild: Callable[[tuple[Array, ...]], Any],
) -> Callable[[tuple[Array, ...], Pool, Any, Array], Pool]:
    """Make a program (weights, pool, inputs, int32[1 + tokens]) -> pool. The numbers are how many patches
    count, and the row of the pool for each token; past its end: nowhere.

    The model's `encode` is given what `Vision.inputs` made, and how many of its patches count, int32[]. It
    returns embeddings [tokens, E] for each array of the pool, those of the image first, and then padding.
    """

    def encode(weights: tuple[Array, ...], pool: Pool, inputs: Any, packed: Array) -> Pool:
        made = rebuild(weights).encode(inputs, packed[0])
        rows = packed[1:]
        pairs = zip(pool, made, strict=True)
        return tuple(array.at[rows].set(new.astype(array.dtype), mode="drop") for array, new in pairs)

    return encode


def pool_shapes(rebuild: Callable[[Any], Any], weights: Any, vision: Vision, num_rows: int) -> Any:
    """Return the shapes and dtypes of the pool's arrays with so many rows."""
    count = jax.ShapeDtypeStruct((), np.dtype(np.int32))
    made = jax.eval_shape(
        lambda leaves, inputs, num: rebuild(leaves).encode(inputs, num),
        weights,
        input_shapes(vision, vision.num_patches or vision.patches_per_token),
        count,
    )
    return tuple(jax.ShapeDtypeStruct((num_rows, *array.shape[1:]), array.dtype) for array in made)


def input_shapes(vision: Vision, bucket: int, sharding: jax.sharding.Sharding | None = None) -> Any:
    """Return the shapes and dtypes of what `Vision.inputs` makes for a bucket."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        vision.inputs((), bucket),
    )


class EncodeCall(NamedTuple):
    """The arguments of one call of a program."""

    bucket: int
    inputs: Any
    packed: NDArray[np.int32]


def encode_call(vision: Vision, buckets: Sequence[int], num_rows: int, encode: Encode | None) -> EncodeCall:
    """Return the call that encodes an image into a pool of so many rows; None: it encodes nothing."""
    items = [] if encode is None else [encode.item]
    patches = sum(item.num_patches for item in items)
    bucket = buckets[bisect_left(buckets, patches)]
    packed = np.full(1 + bucket // vision.patches_per_token, num_rows, np.int32)
    packed[0] = patches
    if encode is not None:
        item = encode.item
        rows = pool_rows(encode.blocks, 0, item.num_tokens)[item.are_embedded(0, item.num_tokens)]
        packed[1 : 1 + len(rows)] = rows
    return EncodeCall(bucket, vision.inputs(items, bucket), packed)


def pool_rows(blocks: Sequence[int], first: int, count: int) -> NDArray[np.int32]:
    """Return the rows of the pool that belong to the tokens [first, first + count) of an image, also to
    those of text, whose rows nobody reads.
    """
    index = np.arange(first, first + count, dtype=np.int32)
    return np.asarray(blocks, np.int32)[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS
