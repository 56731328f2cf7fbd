"""What LoRA adapters add to the products of linear layers: the Python side of `penstock_adapt`
(src/adapters/adapters.h). `ops.adapters` says how the adapters lie in memory, and has the same for XLA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from penstock.runtime.ops.adapters import AdapterPlace, AdapterRows
from penstock.runtime.ops.native import library


def delta(x: Array, rows: AdapterRows, place: AdapterPlace, *, num_rows: Array) -> Array:
    """Compute what the tokens' adapters add to a layer's product: x bfloat16 [T, in] -> float32 [T, out],
    summed in float32. Rows without an adapter, and those from num_rows, int32 [], on are undefined, and cost
    nothing.

    A row of results depends on its own row of x and its adapter alone, bit for bit. Raises ValueError for a
    rank, or numbers of inputs and outputs, that are no multiples of 16.
    """
    if any(size % 16 for size in (rows.rank, place.in_size, *place.parts)):
        raise ValueError("rank, inputs and outputs must be multiples of 16")
    library.load()
    result = jax.ShapeDtypeStruct((x.shape[0], sum(place.parts)), jnp.float32)
    call = jax.ffi.ffi_call("penstock_adapt", result)
    out: Array = call(
        x,
        num_rows,
        rows.slots,
        rows.pool,
        at=np.int64(place.begin * rows.rank),
        rank=np.int64(rows.rank),
        parts=np.array(place.parts, np.int64),
    )
    return out
