"""The operations that recurrent layers are given, as one value that the backend chooses."""

from __future__ import annotations

from typing import NamedTuple

from penstock.runtime.ops.recurrent.conv import ConvOp, causal_conv
from penstock.runtime.ops.recurrent.delta import DeltaOp, gated_delta_net
from penstock.runtime.ops.recurrent.ssd import SsdOp, mamba2


class RecurrentOps(NamedTuple):
    """The operations of recurrent layers. Each takes the state of its layer, float32 [S, ...] by entry of
    `AttentionMeta.state_from` and `state_to`, and returns the new one.
    """

    conv: ConvOp = causal_conv
    delta: DeltaOp = gated_delta_net
    ssd: SsdOp = mamba2


XLA_RECURRENT = RecurrentOps()
"""All operations in XLA."""
