"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464) in XLA, which runs on any
backend and is the reference for the native kernel.

Each value head has a state S [Dk, Dv]. A token changes it in two steps: S decays by a factor of the token's
own; then the value that S holds for the token's key k is replaced, by the share beta, by its value v. The
token's query q reads the result:

    S <- decay * S;  S <- S + k (beta * (v - S^T k))^T;  output = S^T q

A block of tokens is computed at once by the UT transform of the paper's chunked form. What the tokens of a
block write, u_i = beta_i * (v_i - S_i^T k_i), depends on the state before the block and on the u_j before
it, which is a triangular system of equations; all else is products of matrices.
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
KEY_EPS = 1e-6
"""Added to the sum of squares by which queries and keys are normalised."""


class DeltaOp(Protocol):
    """`gated_delta_net` as layers call it."""

    def __call__(
        self,
        qkv: Array,
        z: Array,
        ba: Array,
        state: Array,
        meta: AttentionMeta,
        *,
        a_log: Array,
        dt_bias: Array,
        norm: Array,
        eps: float,
        num_key_heads: int,
    ) -> tuple[Array, Array]: ...


def gated_delta_net(
    qkv: Array,
    z: Array,
    ba: Array,
    state: Array,
    meta: AttentionMeta,
    *,
    a_log: Array,
    dt_bias: Array,
    norm: Array,
    eps: float,
    num_key_heads: int,
) -> tuple[Array, Array]:
    """Compute what a gated delta net does between its convolution and its last product.

    qkv [T, 2 * Hk * Dk + Hv * Dv]: queries, keys and values of all heads side by side. Queries and keys are
    divided by their lengths here, and queries by the root of Dk. Value head h has the queries and keys of key
    head h // (Hv / Hk). z [T, Hv * Dv]: gates of the outputs. ba float32 [T, 2 * Hv]: the logits of beta, and
    then what the decay is made of: decay = exp(-exp(a_log) * softplus(a + dt_bias)), with a_log and dt_bias
    float32 [Hv]. state float32 [S, Hv, Dk, Dv], see `AttentionMeta.state_from`. Each head's output is divided
    by its root mean square, with `eps` in the root, and multiplied by norm, float32 [Dv], and by silu(z). All
    is computed in float32.

    Returns (outputs [T, Hv * Dv] in qkv's dtype, the new state). Outputs of padding tokens are zeros, or what
    the norm and the gate make of zeros.
    """
    num_tokens, _, heads, key_dim, value_dim = qkv.shape[0], *state.shape
    keys = num_key_heads * key_dim
    wide = qkv.astype(jnp.float32)
    q, k = (
        _unit(part.reshape(num_tokens, num_key_heads, key_dim))
        for part in (wide[:, :keys], wide[:, keys : 2 * keys])
    )
    v = wide[:, 2 * keys :].reshape(num_tokens, heads, value_dim)
    beta = jax.nn.sigmoid(ba[:, :heads])
    log_decay = -jnp.exp(a_log)[None] * jax.nn.softplus(ba[:, heads:] + dt_bias[None])
    out, state = delta_rule(q * np.float32(key_dim**-0.5), k, v, log_decay, beta, state, meta)
    mean_square = jnp.mean(jnp.square(out), axis=-1, keepdims=True)
    out = out * lax.rsqrt(mean_square + np.float32(eps)) * norm[None, None]
    gate = jax.nn.silu(z.astype(jnp.float32).reshape(out.shape))
    return (out * gate).reshape(num_tokens, -1).astype(qkv.dtype), state


def _unit(x: Array) -> Array:
    """Divide x [..., D] by its length."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + np.float32(KEY_EPS))


def delta_rule(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, meta: AttentionMeta
) -> tuple[Array, Array]:
    """Apply the rule itself, see the module's docstring: q, k [T, Hk, Dk], v [T, Hv, Dv], log_decay and beta
    [T, Hv], state [S, Hv, Dk, Dv], all float32 -> (outputs [T, Hv, Dv], the new state).
    """
    repeats = v.shape[1] // k.shape[1]

    def step_rows(tokens: Array, before: Array) -> tuple[Array, Array]:
        query, key = (jnp.repeat(x[tokens], repeats, axis=1) for x in (q, k))
        decayed = before * jnp.exp(log_decay[tokens])[..., None, None]
        held = jnp.sum(decayed * key[..., None], axis=2)
        change = beta[tokens][..., None] * (v[tokens] - held)
        after = computed_once(decayed + key[..., None] * change[..., None, :])
        return jnp.sum(after * query[..., None], axis=2), after

    def step_block(tokens: Array, used: Array, before: Array) -> tuple[Array, Array]:
        def of_block(x: Array) -> Array:
            """Turn x [T, H, ...] -> [H, Q, ...], with zeros where the block is padded: a key and a decay of 0
            change no state.
            """
            found = jnp.where(used.reshape(-1, *(1,) * (x.ndim - 1)), x[tokens], 0)
            return jnp.moveaxis(found, 0, 1)

        out, after = _block(
            of_block(q), of_block(k), of_block(v), of_block(log_decay), of_block(beta), before
        )
        return jnp.moveaxis(out, 1, 0), after

    out = jax.ShapeDtypeStruct(v.shape[1:], v.dtype)
    return scan_rows(meta, state, out, step_rows=step_rows, step_block=step_block, block_tokens=BLOCK_TOKENS)


def _block(q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """Compute one block: q, k [Hk, Q, Dk], v [Hv, Q, Dv], log_decay and beta [Hv, Q], state [Hv, Dk, Dv]
    before it -> (outputs [Hv, Q, Dv], state after it).
    """
    repeats = v.shape[0] // k.shape[0]

    def product(subscripts: str, a: Array, b: Array) -> Array:
        return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)

    left = decays(log_decay)
    since_start = jnp.exp(jnp.cumsum(log_decay, axis=1))[..., None]
    key_by_key, query_by_key = (
        jnp.repeat(product("hid,hjd->hij", x, k), repeats, axis=0) * left for x in (k, q)
    )
    q, k = jnp.repeat(q, repeats, axis=0), jnp.repeat(k, repeats, axis=0)
    wanted = beta[..., None] * (v - since_start * product("hid,hdv->hiv", k, state))
    # Only the part below the diagonal counts; the diagonal is taken for ones.
    written = lax.linalg.triangular_solve(
        beta[..., None] * key_by_key, wanted, left_side=True, lower=True, unit_diagonal=True
    )
    out = since_start * product("hid,hdv->hiv", q, state) + product("hij,hjv->hiv", query_by_key, written)
    kept = k * left[:, -1, :, None]
    return out, since_start[:, -1:] * state + product("hid,hiv->hdv", kept, written)
