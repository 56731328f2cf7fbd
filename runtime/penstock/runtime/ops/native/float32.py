"""Linear layers of encoders in float32: the Python side of `penstock_float32` (src/float32/float32.h).

Besides the product it adds bias and residual, computes the activation between two layers and the layer norm
behind them, and skips padding. AMX multiplies pieces of bfloat16, see src/float32/float32_amx.cc; where it is
missing, large matrices are multiplied almost as fast by XLA. A row of results depends on its own row of
operands alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.norm import PLAIN, Plain

BLOCK = 16
MOST_PARTS = 3
"""The most arrays that the outputs of a product can lie in."""
_ABSENT = -1


def can_pack(out_size: int, in_size: int) -> bool:
    """Say whether the kernel multiplies a weight [out_size, in_size]."""
    return out_size % BLOCK == 0 and in_size % BLOCK == 0


def multiply(
    x: Array,
    tiles: Array,
    vectors: Array,
    *,
    num_rows: Array,
    bias_at: int | None = None,
    plain: Plain | None = None,
    residual: Array | None = None,
    eps: float | None = None,
    norm_at: int | None = None,
    norm_bias_at: int | None = None,
    offset: float = 0.0,
) -> Array:
    """Compute norm(residual + plain(x W^T + bias)), of which all but the product may be absent: x float32
    [T, K] -> float32 [T, N].

    tiles: W [N, K] as `linear.pack` makes it of float32, of sizes that `can_pack` takes. vectors: float32
    [any], which has the N values of the bias from `bias_at` on, and those of the norm's weight and bias.
    residual: in the result's shape. eps: in the root of a layer norm over the N outputs; None: there is no
    norm. offset: added to the norm's weights. num_rows int32 []: rows from this one on are padding, which
    costs nothing, and whose results are undefined.
    """
    places = {"bias": bias_at, "norm": norm_at, "norm_bias": norm_bias_at}
    (out,) = _multiplied(
        x,
        tiles,
        vectors,
        num_rows,
        (tiles.shape[0] * BLOCK,),
        library.absent(jnp.float32) if residual is None else residual,
        plain=np.int32(PLAIN[plain]),
        normed=eps is not None,
        eps=np.float32(0.0 if eps is None else eps),
        offset=np.float32(offset),
        **{name: _place(at) for name, at in places.items()},
    )
    return out


def multiply_apart(
    x: Array, tiles: Array, vectors: Array, widths: Sequence[int], *, num_rows: Array, bias_at: int | None
) -> Sequence[Array]:
    """Compute x W^T + bias like `multiply`, with the outputs in up to `MOST_PARTS` arrays: float32
    [T, width], of which the widths are multiples of 16 and add up to N.
    """
    return _multiplied(
        x,
        tiles,
        vectors,
        num_rows,
        widths,
        library.absent(jnp.float32),
        plain=np.int32(PLAIN[None]),
        normed=False,
        eps=np.float32(0.0),
        offset=np.float32(0.0),
        bias=_place(bias_at),
        norm=_place(None),
        norm_bias=_place(None),
    )


def _multiplied(
    x: Array,
    tiles: Array,
    vectors: Array,
    num_rows: Array,
    widths: Sequence[int],
    residual: Array,
    **attributes: np.generic | bool,
) -> Sequence[Array]:
    library.load()
    results = [jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32) for width in widths]
    call = jax.ffi.ffi_call("penstock_float32", results)
    return call(x, num_rows, tiles, vectors, residual, **attributes)


def _place(at: int | None) -> np.int64:
    return np.int64(_ABSENT if at is None else at)
