"""RMS or layer norm, scale and residual in one pass: the Python side of `penstock_norm` (src/norm/norm.h).

Most layers do not need it, because `linear` normalises its input and adds the residual. It is for norms
behind a layer, for norms of parts of a row, for sums of the residual with something that no product made, for
layer norms, and for the activations of MLPs without a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from penstock.runtime.ops.native import library

_LANES = 16
Plain = Literal["gelu", "gelu_tanh"]
"""GELU, exactly or in its approximation by tanh."""
PLAIN: Mapping[Plain | None, int] = {None: 0, "gelu": 1, "gelu_tanh": 2}
"""The numbers in src/norm/norm.h."""


def can_normalize(size: int) -> bool:
    """Say whether the kernel can normalise runs of this many channels."""
    return size > 0 and size % _LANES == 0


def normalize(
    x: Array,
    *,
    num_rows: Array,
    eps: float | None,
    norm: Array | None = None,
    norm_at: int = 0,
    offset: float = 0.0,
    centred: bool = False,
    bias: Array | None = None,
    bias_at: int = 0,
    plain: Plain | None = None,
    size: int | None = None,
    residual: Array | None = None,
    scale: float = 1.0,
    factor: Array | None = None,
    factor_at: int = 0,
) -> Array:
    """Compute (residual + scale * plain(normalised x)) * factor, in x's shape, computed in float32 and
    rounded once.

    x is bfloat16 [T, ...]; a row's channels are cut into runs of `size` (None: the whole row). Each run is
    divided by its root mean square, with `eps` in the root, and multiplied by offset + weight; the weight is
    the `size` values of norm, bfloat16 [any], from `norm_at` on, and without `norm` nothing is multiplied.
    With `eps` None, x is taken as it is. centred: the mean is subtracted first, and what a run is divided by
    is the root of its variance. The `size` values of bias, bfloat16 [any], from `bias_at` on, are added to
    what is normalised.

    residual: bfloat16, in x's shape. factor: one value, at `factor_at`, of a float32 array [any]. num_rows
    int32 []: rows from this one on are padding, which costs nothing, and whose results are undefined. A row
    of results depends on its own row of x and residual alone, bit for bit.

    Raises ValueError if a run is not a multiple of 16 channels or a row not one of runs, if a weight or the
    mean is given without `eps`, or if the residual has another shape.
    """
    channels = int(np.prod(x.shape[1:]))
    size = channels if size is None else size
    if not can_normalize(size) or channels % size:
        raise ValueError(f"size: {size} is not a multiple of {_LANES} that divides the {channels} channels")
    if (norm is not None or centred) and eps is None:
        raise ValueError("eps: a norm with a weight needs one")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual: its shape is {residual.shape}, and that of x {x.shape}")
    library.load()
    none = library.absent(jnp.bfloat16)
    call = jax.ffi.ffi_call("penstock_norm", jax.ShapeDtypeStruct(x.shape, jnp.bfloat16))
    out: Array = call(
        x,
        num_rows,
        none if norm is None else norm,
        none if bias is None else bias,
        none if residual is None else residual,
        library.absent(jnp.float32) if factor is None else factor,
        normed=eps is not None,
        centred=centred,
        plain=np.int32(PLAIN[plain]),
        eps=np.float32(0.0 if eps is None else eps),
        offset=np.float32(offset),
        scale=np.float32(scale),
        size=np.int64(size),
        norm_at=np.int64(norm_at),
        bias_at=np.int64(bias_at),
        factor_at=np.int64(factor_at),
    )
    return out
