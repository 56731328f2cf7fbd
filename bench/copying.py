"""Weights with which a model repeats its prompt word for word, to measure speculation without a real model
(`bench.checkpoint --copies`).

The first layer's first head attends to the position that lies as far back as the prompt is long, less one:
its query and key do not depend on the token, and rotary positions turn them so that they meet there. What it
finds is the code of the token that is to come. Each token's embedding has a random code of signs, and the
last product looks for the code. All other heads and all MLPs are computed as always, and add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROPE_THETA = 1_000_000
_CONSTANT = 8.0
"""What every embedding has behind its code, which query and key are made of."""
_GAIN = 8.0
"""How much stronger the code of the next token is than that of the last one."""
_SHARPNESS = 6.0
"""The norms' weights of queries and keys: attention to any other position is below exp(-10)."""
_ROWS = 4096


def tensor(
    name: str,
    size: tuple[int, ...],
    *,
    hidden_size: int,
    head_dim: int,
    num_prompt: int,
    draw: np.random.Generator,
) -> Iterator[NDArray[np.float32]] | None:
    """Yield the blocks of a tensor of a model that repeats prompts of `num_prompt` tokens; None for one whose
    values do not matter.
    """
    code = min(head_dim, hidden_size * 3 // 4)
    if name == "model.embed_tokens.weight":
        return _embeddings(size, code, draw)
    if name.endswith("norm.weight"):
        sharp = name.startswith("model.layers.0.self_attn.")
        return iter([np.full(size, _SHARPNESS if sharp else 1.0, np.float32)])
    values = np.zeros(size, np.float32)
    if name == "model.layers.0.self_attn.o_proj.weight":
        values[range(code), range(code)] = _GAIN
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        pass
    elif name == "model.layers.0.self_attn.v_proj.weight":
        values[range(code), range(code)] = 1.0
    elif name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        back = num_prompt - 1 if "q_proj" in name else 0
        values[:head_dim, code] = _turned(head_dim, -back)
    else:
        return None
    return iter([values])


def _embeddings(size: tuple[int, ...], code: int, draw: np.random.Generator) -> Iterator[NDArray[np.float32]]:
    num_tokens, hidden = size
    for first in range(0, num_tokens, _ROWS):
        rows = np.zeros((min(_ROWS, num_tokens - first), hidden), np.float32)
        rows[:, :code] = draw.integers(0, 2, (len(rows), code)) * 2 - 1
        rows[:, code] = _CONSTANT
        yield rows


def _turned(head_dim: int, positions: int) -> NDArray[Any]:
    """Return a vector that rotary positions have turned by so many positions. It uses the faster half of the
    pairs, dimension i with i + head_dim / 2, because the others hardly tell positions apart.
    """
    used, half = head_dim // 4, head_dim // 2
    turned = np.zeros(head_dim)
    for i in range(used):
        angle = positions * ROPE_THETA ** (-i / half)
        turned[i], turned[i + half] = math.cos(angle), math.sin(angle)
    return turned
