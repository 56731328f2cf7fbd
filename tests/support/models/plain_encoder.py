"""A second, plain implementation of Qwen's encoders of images, for one image at a time: every patch with
every other one, without blocks, buckets or another order for windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import erf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.models.configs.vision import QwenVisionConfig

Floats = NDArray[np.float64]


class PlainEncoder:
    """Reads tensors by the names of a checkpoint, without what all begin with."""

    def __init__(self, config: QwenVisionConfig, tensors: Mapping[str, NDArray[Any]]) -> None:
        self.config = config
        self.tensors: dict[str, Floats] = {
            name: values.astype(np.float64) for name, values in tensors.items()
        }

    def encode(self, patches: NDArray[Any], rows: int, columns: int) -> list[Floats]:
        """patches [N, values], square by square -> the image's tokens, then those of deepstack."""
        config = self.config
        squares = [(r, c) for r in range(0, rows, 2) for c in range(0, columns, 2)]
        places = np.array([(r + i, c + j) for r, c in squares for i in (0, 1) for j in (0, 1)])
        kernels = self.tensors["patch_embed.proj.weight"]
        x = patches.astype(np.float64) @ kernels.reshape(len(kernels), -1).T
        x = x + self.tensors.get("patch_embed.proj.bias", np.zeros(len(kernels)))
        if config.position_side is not None:
            x = x + self._positions(places, rows, columns)
        frequencies = 1 / 10_000.0 ** (np.arange(0, config.head_dim // 2, 2) / (config.head_dim // 2))
        angles = np.concatenate([places[:, :1] * frequencies, places[:, 1:] * frequencies], axis=1)[:, None]
        further = []
        for block in range(config.depth):
            window = None if block in config.full_blocks else config.window
            group = places * 0 if window is None else places // window
            seen = (group[:, None] == group[None]).all(axis=2)
            at = f"blocks.{block}"
            x = x + self._attention(self._norm(x, f"{at}.norm1"), f"{at}.attn", angles, seen)
            x = x + self._mlp(self._norm(x, f"{at}.norm2"), f"{at}.mlp")
            if block in config.deepstack:
                name = f"deepstack_merger_list.{config.deepstack.index(block)}"
                further.append(self._merged(self._norm(x.reshape(len(x) // 4, -1), f"{name}.norm"), name))
        norm = "merger.ln_q" if config.rms_norms else "merger.norm"
        return [self._merged(self._norm(x, norm).reshape(len(x) // 4, -1), "merger"), *further]

    def _linear(self, x: Floats, name: str) -> Floats:
        y: Floats = x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]
        return y

    def _norm(self, x: Floats, name: str) -> Floats:
        if not self.config.rms_norms:
            x = x - x.mean(axis=1, keepdims=True)
        scale: Floats = np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6)
        y: Floats = x / scale * self.tensors[f"{name}.weight"]
        return y if self.config.rms_norms else y + self.tensors[f"{name}.bias"]

    def _positions(self, places: NDArray[Any], rows: int, columns: int) -> Floats:
        """Return the table, interpolated along its rows and then along its columns."""
        side = self.config.position_side
        assert side is not None
        table = self.tensors["pos_embed.weight"].reshape(side, side, -1)

        def along(values: Floats, count: int) -> Floats:
            where = np.linspace(0, side - 1, count)
            low = np.minimum(where.astype(int), side - 2)
            share = (where - low)[:, None, None]
            between: Floats = values[low] * (1 - share) + values[low + 1] * share
            return between

        grid: Floats = along(along(table, rows).transpose(1, 0, 2), columns).transpose(1, 0, 2)
        found: Floats = grid[places[:, 0], places[:, 1]]
        return found

    def _attention(self, x: Floats, name: str, angles: Floats, seen: NDArray[Any]) -> Floats:
        q, k, v = self._linear(x, f"{name}.qkv").reshape(len(x), 3, self.config.num_heads, -1).swapaxes(0, 1)

        def turned(values: Floats) -> Floats:
            first, second = np.split(values, 2, axis=2)
            cos, sin = np.cos(angles), np.sin(angles)
            return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)

        scores = np.einsum("qhd,khd->hqk", turned(q), turned(k)) / np.sqrt(self.config.head_dim)
        shares = np.where(seen, np.exp(scores - scores.max(axis=2, keepdims=True)), 0)
        shares /= shares.sum(axis=2, keepdims=True)
        return self._linear(np.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1), f"{name}.proj")

    def _mlp(self, x: Floats, name: str) -> Floats:
        if self.config.gated:
            gate = self._linear(x, f"{name}.gate_proj")
            return self._linear(
                gate / (1 + np.exp(-gate)) * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj"
            )
        inner = self._linear(x, f"{name}.linear_fc1")
        inner = inner * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
        return self._linear(inner, f"{name}.linear_fc2")

    def _merged(self, x: Floats, name: str) -> Floats:
        parts = ("mlp.0", "mlp.2") if self.config.rms_norms else ("linear_fc1", "linear_fc2")
        inner = self._linear(x, f"{name}.{parts[0]}")
        inner = inner * 0.5 * (1 + np.vectorize(erf)(inner / np.sqrt(2)))
        return self._linear(inner, f"{name}.{parts[1]}")
