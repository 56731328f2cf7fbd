"""The program that encodes pictures, and how its calls are packed.

One program per bucket of patches takes a picture and writes its embeddings into the pool: arrays of rows, one
row for each token of a picture, in the blocks that the scheduler has chosen. A call takes one picture only:
so the bits of its embeddings depend on nothing else, whatever is encoded in the same step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from penstock.runtime.execution.buckets import geometric
from penstock.runtime.media.vision import Vision
from penstock.runtime.scheduling.media.pool import BLOCK_TOKENS
from penstock.runtime.scheduling.plan import Encode

FIRST_BUCKET = 256
"""Patches that the smallest program encodes, padding included."""
Pool = tuple[Array, ...]
"""Embeddings of pictures, [rows, E] each: those that take the place of the tokens', and those of each layer
that gets some besides. Empty for a model that reads no pictures."""


def encode_buckets(vision: Vision, max_tokens: int, growth: int) -> tuple[int, ...]:
    """Numbers of patches for which there are programs: each `growth` times the one before, up to those of a
    picture of `max_tokens`.
    """
    per_token = vision.patches_per_token
    return geometric(-(-FIRST_BUCKET // per_token) * per_token, growth, max_tokens * per_token)


def make_encode(
    rebuild: Callable[[tuple[Array, ...]], Any],
) -> Callable[[tuple[Array, ...], Pool, Any, Array], Pool]:
    """A program (weights, pool, inputs, int32[1 + tokens]) -> pool. The numbers are how many patches count,
    and the row of the pool for each token; past its end: nowhere.

    The model's `encode` is given what `Vision.inputs` made, and how many of its patches count, int32[]. It
    returns embeddings [tokens, E] for each array of the pool, those of the picture first, and then padding.
    """

    def encode(weights: tuple[Array, ...], pool: Pool, inputs: Any, packed: Array) -> Pool:
        made = rebuild(weights).encode(inputs, packed[0])
        rows = packed[1:]
        pairs = zip(pool, made, strict=True)
        return tuple(array.at[rows].set(new.astype(array.dtype), mode="drop") for array, new in pairs)

    return encode


def pool_shapes(rebuild: Callable[[Any], Any], weights: Any, vision: Vision, num_rows: int) -> Any:
    """The shapes and dtypes of the pool's arrays with so many rows."""
    count = jax.ShapeDtypeStruct((), np.dtype(np.int32))
    made = jax.eval_shape(
        lambda leaves, inputs, num: rebuild(leaves).encode(inputs, num),
        weights,
        input_shapes(vision, vision.patches_per_token),
        count,
    )
    return tuple(jax.ShapeDtypeStruct((num_rows, *array.shape[1:]), array.dtype) for array in made)


def input_shapes(vision: Vision, bucket: int, sharding: jax.sharding.Sharding | None = None) -> Any:
    """Shapes and dtypes of what `Vision.inputs` makes for a bucket."""
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
    """The call that encodes a picture into a pool of so many rows; None: it encodes nothing."""
    items = [] if encode is None else [encode.item]
    patches = sum(item.num_patches for item in items)
    bucket = buckets[bisect_left(buckets, patches)]
    packed = np.full(1 + bucket // vision.patches_per_token, num_rows, np.int32)
    packed[0] = patches
    if encode is not None:
        count = encode.item.num_tokens
        packed[1 : 1 + count] = pool_rows(encode.blocks, 0, count)
    return EncodeCall(bucket, vision.inputs(items, bucket), packed)


def pool_rows(blocks: Sequence[int], first: int, count: int) -> NDArray[np.int32]:
    """The rows of the pool with the embeddings of the tokens [first, first + count) of a picture."""
    index = np.arange(first, first + count, dtype=np.int32)
    return np.asarray(blocks, np.int32)[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS
