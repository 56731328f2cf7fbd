"""A model that reads images and whose every token can be computed by hand.

Each token has a value: its id or, if it is a token of an image, what the encoder makes of its patches, which
tells the image and the place in it. To this is added what its three rotary positions are. After n tokens
the next one is (7 * sum of the values + 3 * n + 1) mod vocabulary, where the sum comes from the paged cache
as in `tests.support.models.toy`. So a row of another image or place, an old one, or a wrong rotary position
makes a wrong token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from penstock.runtime.images.vision import Grid, Vision
from penstock.runtime.loading.served_model import ServedModel
from penstock.runtime.models.layers.images import MediaInputs
from penstock.runtime.ops.attention import AttentionMeta, AttentionOp, AttentionOptions
from penstock.runtime.ops.recurrent.operations import RecurrentOps
from penstock.runtime.requests.images import MediaItem, RotaryPositions, digest_of
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.support.models.toy import OFFSET, VOCAB, plain_rules, toy_model

PAD = 59
"""The token that stands for an image."""
BREAK = 58
"""The token of text behind the rows of an image."""
PER_TOKEN = 4
_TURNS = np.array([1, 2, 3])
_MOST = 5
_DIM = 4


class Inputs(NamedTuple):
    patches: NDArray[np.float32]  # [bucket, 2]


def vision_inputs(items: Sequence[MediaItem], bucket: int) -> Inputs:
    patches = np.full((bucket, 2), 1000, np.float32)  # padding that would be noticed
    at = 0
    for item in items:
        patches[at : at + item.num_patches] = item.patches
        at += item.num_patches
    return Inputs(patches)


def rotary_positions(length: int, items: Sequence[MediaItem]) -> RotaryPositions:
    """Count on from token to token, and over an image as much as it is wide and high."""
    positions = np.zeros((3, length), np.int32)
    at = position = 0
    for item in items:
        positions[:, at : item.start] = position + np.arange(item.start - at)
        position += item.start - at
        index = np.arange(item.num_tokens)
        positions[:, item.start : item.end] = position + np.stack([0 * index, index // 2, index % 2])
        position += max(2, -(-item.num_tokens // 2))
        at = item.end
    positions[:, at:] = position + np.arange(length - at)
    return RotaryPositions(positions, position + length - at - length)


def grid_problem(grid: Grid) -> str | None:
    """Say what is wrong with a grid; a token is a square of four patches."""
    return "is no whole squares" if min(grid) < 1 or grid[1] % 2 or grid[2] % 2 else None


VISION = Vision(
    image_token_id=PAD,
    patches_per_token=PER_TOKEN,
    patch_values=2,
    inputs=vision_inputs,
    rotary_positions=rotary_positions,
    grid_problem=grid_problem,
)


def image(number: int, num_tokens: int, row_tokens: int | None = None) -> MediaItem:
    """Make an image that stands nowhere yet, of so many embeddings. Images with other numbers have other
    patches. row_tokens: see `MediaItem`.
    """
    rng = np.random.default_rng(number)
    patches = rng.integers(0, VOCAB, (PER_TOKEN * num_tokens, 2)).astype(np.float32)
    grid = (1, 2, 2 * num_tokens)
    texts = 0 if row_tokens is None else num_tokens // row_tokens
    return MediaItem(patches, grid, digest_of(patches, grid), 0, num_tokens + texts, row_tokens)


def request_of(name: str, parts: Sequence[int | MediaItem], num_tokens: int, **changes: Any) -> Request:
    """Make a greedy request for so many tokens after these tokens and images."""
    tokens: list[int] = []
    media: list[MediaItem] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            media.append(dataclasses.replace(part, start=len(tokens)))
            row = [PAD] * (part.row_tokens or part.num_tokens) + [BREAK] * (part.row_tokens is not None)
            tokens += row * (part.num_tokens // len(row))
    return Request(
        name,
        tuple(tokens),
        ResolvedSampling(temperature=0.0),
        StoppingParams(max_tokens=num_tokens, ignore_eos=True),
        media=tuple(media),
        rotary=rotary_positions(len(tokens), media) if media else None,
        **changes,
    )


def expected_tokens(request: Request, offset: int = OFFSET) -> list[int]:
    """Return the request's tokens, by the formula."""
    tokens = [float(token) for token in request.prompt_token_ids]
    for item in request.media:
        embeddings = item.patches[::PER_TOKEN, 0] + item.patches[1::PER_TOKEN, 1] + offset - OFFSET
        row = item.row_tokens or item.num_tokens
        for number, embedding in enumerate(embeddings.tolist()):
            tokens[item.start + number + number // row] = embedding
    made: list[int] = []
    while len(made) < (request.stopping.max_tokens or 0):
        count = len(tokens)
        positions = np.tile(np.arange(count), (3, 1))
        if request.rotary is not None:
            num_prompt = len(request.prompt_token_ids)
            positions[:, :num_prompt] = request.rotary.positions
            positions[:, num_prompt:] += request.rotary.delta
        turns = (_TURNS @ positions) % _MOST
        made.append(int(7 * (sum(tokens) + turns.sum()) + 3 * count + offset) % VOCAB)
        tokens.append(made[-1])
    return made


class ToyImageLM(nnx.Module):
    """See the module docstring; the only weight is the offset."""

    def __init__(self) -> None:
        self.offset = nnx.Param(jnp.full((1,), OFFSET, jnp.float32))

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv: tuple[jax.Array, ...],
        metas: tuple[AttentionMeta, ...],
        *,
        attention: AttentionOp,
        recurrent: RecurrentOps,
        media: MediaInputs,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        values = media.add(media.replace(token_ids.astype(jnp.float32)[:, None]), 0)
        turns = (jnp.array(_TURNS, jnp.int32) @ media.positions) % _MOST
        zeros = jnp.zeros((token_ids.shape[0], 1, _DIM), jnp.float32)
        inputs = zeros.at[:, 0, 0].set(values[:, 0] + turns.astype(jnp.float32))
        mean, layer = attention(zeros, zeros, inputs, kv[0], metas[0], AttentionOptions(1.0))
        count = (positions + 1).astype(jnp.float32)
        return jnp.stack([jnp.round(mean[:, 0, 0] * count), count], axis=1), (layer,)

    def encode(self, inputs: Inputs, num_patches: jax.Array) -> tuple[jax.Array, ...]:
        """Two arrays: the second is added to the first. New weights encode an image otherwise."""
        patches = jnp.asarray(inputs.patches)
        return patches[::PER_TOKEN, :1] + self.offset[0] - OFFSET, patches[1::PER_TOKEN, 1:]

    def normalized(self, hidden: jax.Array) -> jax.Array:
        return hidden

    def logits(self, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
        following = (7 * hidden[:, 0] + 3 * hidden[:, 1] + self.offset[...]) % VOCAB
        return 10 * jax.nn.one_hot(following.astype(jnp.int32), VOCAB, dtype=jnp.float32)


def toy_image_model(max_model_len: int = 200) -> ServedModel:
    """Make a ServedModel with a ToyImageLM, without a tokenizer."""
    graphdef, weights = nnx.split(ToyImageLM())
    return dataclasses.replace(
        toy_model(max_model_len=max_model_len),
        name="toy_image",
        architecture="ToyImageForCausalLM",
        graphdef=graphdef,
        weights=jax.device_put(weights, jax.devices()[0]),
        rules=plain_rules(offset=(1,)),
        vision=VISION,
    )
