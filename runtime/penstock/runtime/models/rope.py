"""Rotary position embedding and its context-extension variants.

Sources: Su et al. 2021 (RoPE, arXiv 2104.09864); kaiokendev (linear interpolation); bloc97 and emozilla
(dynamic NTK); Peng et al. 2023 (YaRN, arXiv 2309.00071); Meta's llama-models (llama3 scaling);
Ding et al. 2024 (LongRoPE, arXiv 2402.13753); Wang et al. 2024 (M-RoPE, arXiv 2409.12191). Semantics,
names and defaults follow Hugging Face transformers' `modeling_rope_utils`. Channel i turns with channel i +
rotary_dim / 2, as in most of its checkpoints; where a checkpoint has these two side by side, its rows are put
into our order when it is loaded.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]
ROPE_KINDS: tuple[RopeKind, ...] = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "llama3",
    "longrope",
    "proportional",
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One RoPE variant; fields that a kind does not use keep their defaults.

    original_max_positions: length that the model was trained on before its context was extended (dynamic,
    yarn, llama3, longrope). attention_factor: multiplies cos and sin, and so attention scores by its square;
    1 except for yarn and longrope.
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    partial_rotary_factor: float = 1.0
    """The share of a head's channels that is rotated: the first ones; with "proportional", of the pairs (i, i
    + head_dim / 2) those with the lowest i."""
    short_factors: tuple[float, ...] = ()
    """LongRoPE: what the frequency of each pair of channels is divided by, in contexts no longer than the
    original one."""
    long_factors: tuple[float, ...] = ()
    """The same for longer contexts."""
    serves_long: bool = False
    """Which of the two are used, for every token: keys in the cache must not depend on how long a sequence
    becomes."""
    sections: tuple[int, ...] = ()
    """M-RoPE: how many pairs of channels turn by the time, the row and the column of a token of an image.
    Empty: all turn by one position."""
    interleaved: bool = False
    """Whether pairs of time, row and column alternate, as long as there are such; else each section is one
    range."""

    def for_context(self, max_len: int) -> RopeConfig:
        """Return the RoPE of a server whose sequences have at most `max_len` tokens."""
        if self.kind != "longrope":
            return self
        return dataclasses.replace(self, serves_long=max_len > self.original_max_positions)

    def rotary_dim(self, head_dim: int) -> int:
        """Tell how many channels of a head are rotated."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial_rotary_factor)


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """Return YaRN's temperature, 0.1 ln(s) + 1 (equation 22), or DeepSeek's ratio when both mscales are
    given.
    """

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def longrope_attention_factor(factor: float, original_max_positions: int) -> float:
    """Return LongRoPE's temperature for a context that is `factor` times as long as the original one."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max_positions))


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> npt.NDArray[np.float32]:
    """Compute the radians per position of each pair of channels, float32 [rotary_dim / 2], computed in
    float64.

    For "dynamic" they are not scaled: `cos_sin` scales them by position.
    """
    pair = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    plain = rope.theta**-pair
    match rope.kind:
        case "default" | "dynamic":
            result = plain
        case "linear":
            result = plain / rope.factor
        case "yarn":
            result = _yarn(plain, rope, rotary_dim)
        case "llama3":
            result = _llama3(plain, rope)
        case "proportional":
            turning = int(rope.partial_rotary_factor * rotary_dim // 2)
            result = np.where(np.arange(len(plain)) < turning, plain, 0.0) / rope.factor
        case "longrope":
            result = plain / np.asarray(rope.long_factors if rope.serves_long else rope.short_factors)
    return result.astype(np.float32)


def _yarn(plain: npt.NDArray[np.float64], rope: RopeConfig, rotary_dim: int) -> npt.NDArray[np.float64]:
    """Keep the frequency of fast pairs and interpolate slow ones, with a linear ramp in between (YaRN,
    3.2).
    """

    def pair_turning(rotations: float) -> float:
        """Compute the (fractional) pair that makes `rotations` full turns over the original context."""
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(rotary_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return plain * (1 - interpolated) + plain / rope.factor * interpolated


def _llama3(plain: npt.NDArray[np.float64], rope: RopeConfig) -> npt.NDArray[np.float64]:
    """Divide slow pairs by factor, keep fast ones, and blend those in between linearly in turns per context.
    If both bounds are the same, nothing is between them.
    """
    turns = rope.original_max_positions * plain / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns >= low).astype(float)
    return plain * kept + plain / rope.factor * (1 - kept)


def axes(rope: RopeConfig, num_pairs: int) -> npt.NDArray[np.intp]:
    """Say by which of time (0), row (1) and column (2) each pair of channels turns, [num_pairs]; see
    `RopeConfig.sections`.
    """
    if not rope.interleaved:
        return np.repeat(np.arange(3), rope.sections)
    found = np.zeros(num_pairs, np.intp)
    for axis in (1, 2):
        found[axis : 3 * rope.sections[axis] : 3] = axis
    return found


def cos_sin(rope: RopeConfig, rotary_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute cosines and sines for positions int32 [T], or [3, T] with `sections`: two float32
    [T, rotary_dim / 2].

    Dynamic NTK is defined per position: below `original_max_positions` nothing is scaled; position p beyond
    it uses the base for a context of p + 1. That is what transformers computes token by token with a cache,
    and it does not depend on how a prompt is cut into chunks.
    """
    position = positions.astype(jnp.float32)[..., None]
    if positions.ndim == 2:
        position = positions.astype(jnp.float32)[axes(rope, rotary_dim // 2)].T
    angle = position * jnp.asarray(inverse_frequencies(rope, rotary_dim))[None, :]
    if rope.kind == "dynamic":
        limit = np.float32(rope.original_max_positions)
        beyond = jnp.maximum(position + np.float32(1), limit) - limit
        stretch = np.float32(1) + np.float32(rope.factor) * beyond / limit  # exactly 1 within the limit
        # base' = base * stretch^(d / (d - 2)), so frequency i is base^(-2i / d) * stretch^(-2i / (d - 2))
        power = -np.arange(0, rotary_dim, 2, dtype=np.float64) / (rotary_dim - 2)
        angle = angle * jnp.power(stretch, jnp.asarray(power.astype(np.float32))[None, :])
    scale = np.float32(rope.attention_factor)
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the first rotary_dim channels of x [T, heads, head_dim] by cos and sin float32
    [T, rotary_dim / 2], in float32, and keep the others; the result has x's dtype.
    """
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second, kept = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, kept], axis=-1)
    return turned.astype(x.dtype)
