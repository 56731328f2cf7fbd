"""Mamba-2's selective state space (Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060) in XLA, which
runs on any backend and is the reference for the native kernel.

Each head has a state S [N, P]. A token decays it, adds its input x to it along its key B, and reads the
result along its query C:

    S <- exp(-exp(a_log) dt) S + B (dt x)^T;  y = S^T C + skip x

where dt, the token's time step, is made of a number of the token's own. A block of tokens is computed at once
by the paper's dual form, which is attention without a softmax: token i reads of token j what its decays since
then have left, times the product of C_i and B_j; all else is in the state before the block.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from penstock.runtime.ops.attention import AttentionMeta
from penstock.runtime.ops.recurrent.blocks import computed_once, decays, scan_rows

BLOCK_TOKENS = 64
"""Tokens that the chunked form computes at once."""


class SsdOp(Protocol):
    """`mamba2` as layers call it."""

    def __call__(
        self,
        xbc: Array,
        gate: Array,
        dt: Array,
        state: Array,
        meta: AttentionMeta,
        *,
        a_log: Array,
        dt_bias: Array,
        skip: Array,
        norm: Array,
        eps: float,
        num_groups: int,
        dt_limit: tuple[float, float],
    ) -> tuple[Array, Array]: ...


def mamba2(
    xbc: Array,
    gate: Array,
    dt: Array,
    state: Array,
    meta: AttentionMeta,
    *,
    a_log: Array,
    dt_bias: Array,
    skip: Array,
    norm: Array,
    eps: float,
    num_groups: int,
    dt_limit: tuple[float, float],
) -> tuple[Array, Array]:
    """Compute what a Mamba-2 layer does between its convolution and its last product.

    xbc [T, H * P + 2 * G * N]: inputs, keys and queries of all heads side by side. The H heads are in G =
    `num_groups` groups, each of which has one key and one query. gate [T, H * P]: gates of the outputs. dt
    float32 [T, H]: what the time steps are made of: clip(softplus(dt + dt_bias), *dt_limit). state float32
    [S, H, N, P], see `AttentionMeta.state_from`. a_log, dt_bias, skip float32 [H]; see the module's
    docstring. Outputs are multiplied by silu(gate), divided by the root mean square of the channels of each
    group, with `eps` in the root, and multiplied by norm, float32 [H * P]. All is computed in float32.

    Returns (outputs [T, H * P] in xbc's dtype, the new state). Outputs of padding tokens are undefined.
    """
    y, state = gated_scan(
        xbc,
        gate,
        dt,
        state,
        meta,
        a_log=a_log,
        dt_bias=dt_bias,
        skip=skip,
        num_groups=num_groups,
        dt_limit=dt_limit,
    )
    grouped = y.reshape(y.shape[0], num_groups, -1)
    mean_square = jnp.mean(jnp.square(grouped), axis=-1, keepdims=True)
    y = (grouped * lax.rsqrt(mean_square + np.float32(eps))).reshape(y.shape)
    return (y * norm[None]).astype(xbc.dtype), state


def gated_scan(
    xbc: Array,
    gate: Array,
    dt: Array,
    state: Array,
    meta: AttentionMeta,
    *,
    a_log: Array,
    dt_bias: Array,
    skip: Array,
    num_groups: int,
    dt_limit: tuple[float, float],
) -> tuple[Array, Array]:
    """Compute `mamba2` before its norm: (outputs float32 [T, H * P], the new state)."""
    num_tokens, _, heads, state_dim, head_dim = xbc.shape[0], *state.shape
    inner, keys = heads * head_dim, num_groups * state_dim
    wide = xbc.astype(jnp.float32)
    x = wide[:, :inner].reshape(num_tokens, heads, head_dim)
    b, c = (
        wide[:, begin : begin + keys].reshape(num_tokens, num_groups, state_dim)
        for begin in (inner, inner + keys)
    )
    steps = jnp.clip(jax.nn.softplus(dt + dt_bias[None]), *map(np.float32, dt_limit))
    y, state = selective_scan(x * steps[..., None], b, c, -jnp.exp(a_log)[None] * steps, state, meta)
    y = (y + skip[None, :, None] * x).reshape(num_tokens, inner)
    return y * jax.nn.silu(gate.astype(jnp.float32)), state


def selective_scan(
    x: Array, b: Array, c: Array, log_decay: Array, state: Array, meta: AttentionMeta
) -> tuple[Array, Array]:
    """Run the recurrence itself, see the module's docstring: x [T, H, P] with its time steps, b and c [T, G,
    N], log_decay [T, H], state [S, H, N, P], all float32 -> (outputs [T, H, P], the new state).
    """
    repeats = x.shape[1] // b.shape[1]

    def step_rows(tokens: Array, before: Array) -> tuple[Array, Array]:
        key, query = (jnp.repeat(part[tokens], repeats, axis=1) for part in (b, c))
        decayed = before * jnp.exp(log_decay[tokens])[..., None, None]
        after = computed_once(decayed + key[..., None] * x[tokens][..., None, :])
        return jnp.sum(after * query[..., None], axis=2), after

    def step_block(tokens: Array, used: Array, before: Array) -> tuple[Array, Array]:
        def of_block(part: Array) -> Array:
            """Turn [T, H, ...] -> [H, Q, ...], with zeros where the block is padded: an input and a decay of
            0 change no state.
            """
            found = jnp.where(used.reshape(-1, *(1,) * (part.ndim - 1)), part[tokens], 0)
            return jnp.moveaxis(found, 0, 1)

        out, after = _block(of_block(x), of_block(b), of_block(c), of_block(log_decay), before)
        return jnp.moveaxis(out, 1, 0), after

    out = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    return scan_rows(meta, state, out, step_rows=step_rows, step_block=step_block, block_tokens=BLOCK_TOKENS)


def _block(x: Array, b: Array, c: Array, log_decay: Array, state: Array) -> tuple[Array, Array]:
    """Compute one block: x [H, Q, P], b and c [G, Q, N], log_decay [H, Q], state [H, N, P] before it ->
    (outputs [H, Q, P], state after it).
    """
    repeats = x.shape[0] // b.shape[0]

    def product(subscripts: str, one: Array, other: Array) -> Array:
        return jnp.einsum(subscripts, one, other, precision=lax.Precision.HIGHEST)

    left = decays(log_decay)
    since_start = jnp.exp(jnp.cumsum(log_decay, axis=1))[..., None]
    read = jnp.repeat(product("gin,gjn->gij", c, b), repeats, axis=0) * left
    b, c = jnp.repeat(b, repeats, axis=0), jnp.repeat(c, repeats, axis=0)
    out = since_start * product("hin,hnp->hip", c, state) + product("hij,hjp->hip", read, x)
    kept = b * left[:, -1, :, None]
    return out, since_start[:, -1:] * state + product("hin,hip->hnp", kept, x)
