"""The operations of recurrent layers by the native CPU kernels, or in XLA for sizes that these lack."""

from __future__ import annotations

from jax import Array

from penstock.runtime.ops.attention import AttentionMeta
from penstock.runtime.ops.native import state as kernels
from penstock.runtime.ops.recurrent.conv import ConvActivation, causal_conv
from penstock.runtime.ops.recurrent.delta import gated_delta_net
from penstock.runtime.ops.recurrent.operations import RecurrentOps
from penstock.runtime.ops.recurrent.ssd import mamba2


def native_causal_conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    state: Array,
    meta: AttentionMeta,
    activation: ConvActivation | None = None,
) -> tuple[Array, Array]:
    """See `causal_conv`."""
    if not kernels.can_convolve(x.dtype, x.shape[1], weight.shape[0]):
        return causal_conv(x, weight, bias, state, meta, activation)
    return kernels.convolve(x, weight, bias, state, _rows(meta), silu=activation == "silu")


def native_gated_delta_net(
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
    """See `gated_delta_net`."""
    if not kernels.can_recur(qkv.dtype, *state.shape[2:]):
        return gated_delta_net(
            qkv,
            z,
            ba,
            state,
            meta,
            a_log=a_log,
            dt_bias=dt_bias,
            norm=norm,
            eps=eps,
            num_key_heads=num_key_heads,
        )
    return kernels.gated_delta_net(
        qkv,
        z,
        ba,
        state,
        _rows(meta),
        a_log=a_log,
        dt_bias=dt_bias,
        norm=norm,
        eps=eps,
        num_key_heads=num_key_heads,
    )


def native_mamba2(
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
    """See `mamba2`."""
    if not kernels.can_recur(xbc.dtype, *state.shape[2:]):
        return mamba2(
            xbc,
            gate,
            dt,
            state,
            meta,
            a_log=a_log,
            dt_bias=dt_bias,
            skip=skip,
            norm=norm,
            eps=eps,
            num_groups=num_groups,
            dt_limit=dt_limit,
        )
    return kernels.mamba2(
        xbc,
        gate,
        dt,
        state,
        _rows(meta),
        a_log=a_log,
        dt_bias=dt_bias,
        skip=skip,
        norm=norm,
        eps=eps,
        num_groups=num_groups,
        dt_limit=dt_limit,
    )


def _rows(meta: AttentionMeta) -> kernels.StateRows:
    assert meta.state_from is not None
    assert meta.state_to is not None
    return kernels.StateRows(meta.q_lens, meta.state_from, meta.state_to, meta.state_cut, meta.state_cut_to)


NATIVE_RECURRENT = RecurrentOps(conv=native_causal_conv, delta=native_gated_delta_net, ssd=native_mamba2)
"""All operations by the native kernels."""
