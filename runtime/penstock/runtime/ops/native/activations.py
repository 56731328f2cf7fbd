"""The activations of gated layers that the kernels know, by name and by number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gpt_oss", "sigmoid"]
"""`gelu_tanh` is GELU in its approximation by tanh. `gpt_oss` bounds the gate from above and up on both sides
by a limit, and is gate * sigmoid(1.702 * gate) * (up + 1). `sigmoid` is sigmoid(gate) * up, the gate of
Qwen3-Next's attention.
"""
ACTIVATIONS: Mapping[Activation, int] = {"silu": 1, "gelu_tanh": 2, "gpt_oss": 3, "sigmoid": 4}
"""The numbers in src/common/activations.h, where 0 is a product without a gate."""
