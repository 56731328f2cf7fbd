"""What a model keeps of the tokens it has processed: for each layer the kind of cache, and the memory it
takes.

The cache is a tuple with an entry for each layer, in the layers' order. There are three kinds of entries:

- `PagedKV`: keys and values of every position, in pages that requests hold and share; or, with a window, of
  the latest positions only.
- `LatentKV`: the same pages for latent attention, which keeps one small vector that all heads share.
- `SlotState`: arrays of a fixed size for each slot, such as the state of a recurrent layer.

Layers with equal windows are a group (`CacheSpec.windows`); those without a window are another. A request has
a page table for each group, so layers with a window hold only what they still attend to.

State by slot is kept twice (`state_copies`). A step reads the copy that the row's last step left, and writes
the other one. So when a position is computed again, because a window of steps has ended for the row or its
token was put off, the step finds the same state as the first time.

Behind the slots' copies stand the snapshots: states after the first pages of a prompt, which are kept so that
other requests with these pages can go on from there (`paging.snapshots`). A row reads a snapshot, or
writes one, just as it does the copies of its slot, so nothing is ever copied from one place to the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Any

import jax
import numpy as np

from penstock.runtime.errors import ConfigError
from penstock.runtime.ops.kv_rows import GPU_LANES, SCALE_BYTES, kv_layer_shape

STATE_COPIES = 2
"""Copies of each slot's state, see the module's docstring."""
TPU_LANES = 128
"""What the width of KV rows on TPUs is a multiple of. XLA stores the last axis of arrays there in tiles of so
many numbers. Of narrower rows it puts another axis last. Steps then copy the whole cache to write it, and the
kernels cannot read it."""
_INT8 = np.dtype(np.int8)


def cache_dtype(kv_cache_dtype: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the keys and values in the cache of a model in `dtype`, for what
    `EngineConfig.kv_cache_dtype` says.
    """
    return _INT8 if kv_cache_dtype == "int8" else dtype


@dataclass(frozen=True, slots=True)
class PagedKV:
    """A key and a value of shape [num_kv_heads, head_dim] for each position."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """How many latest positions, its own included, a token attends to; None: all."""
    lanes: int = 1
    """See `CacheSpec.laid_out`."""
    group: int = field(default=1, compare=False)
    """How many heads of queries read a head of keys, which changes nothing of what is kept."""

    @property
    def num_queries(self) -> int:
        """Heads of queries."""
        return self.num_kv_heads * self.group

    @property
    def value_dim(self) -> None:
        """The values are kept beside the keys, and are no channels of them."""
        return None

    def page_bytes(self, page_size: int, dtype: np.dtype[Any]) -> int:
        """Count the bytes of one page of keys and values in `dtype`."""
        return math.prod(_shape(self, 1, page_size, dtype)) * int(dtype.itemsize)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return 0

    def arrays(
        self, num_pages: int, page_size: int, num_slots: int, dtype: np.dtype[Any], num_snapshots: int = 0
    ) -> Any:
        """Return this layer's entry of the cache, as shapes and dtypes."""
        return jax.ShapeDtypeStruct(_shape(self, num_pages, page_size, dtype), dtype)


@dataclass(frozen=True, slots=True)
class LatentKV:
    """Of each position one vector, the key of all heads: `latent_dim` channels, of which keys and values of
    each head are linear functions, and `rope_dim` channels with a rotary embedding, which all heads share.
    The latent channels are the value too, so that nothing is stored twice.
    """

    latent_dim: int
    rope_dim: int
    pieces: int = 1
    """Over how many devices the pages are dealt (`dealt_pages`)."""
    lanes: int = 1
    """See `CacheSpec.laid_out`."""

    @property
    def num_kv_heads(self) -> int:
        """One, because all heads share the key."""
        return 1

    @property
    def num_queries(self) -> int:
        """Heads of queries, of which one stands for all: what attends asks for no more."""
        return 1

    @property
    def head_dim(self) -> int:
        """Channels of the key."""
        return self.latent_dim + self.rope_dim

    @property
    def value_dim(self) -> int:
        """How many of the key's channels, from the first on, are the value."""
        return self.latent_dim

    @property
    def window(self) -> None:
        """A token attends to all positions before it."""
        return None

    def page_bytes(self, page_size: int, dtype: np.dtype[Any]) -> int:
        """Count the bytes of one page of keys in `dtype`; of dealt pages what each device has of as many as
        there are devices, divided by these.
        """
        whole = math.prod(_shape(self, 1, page_size, dtype)) * int(dtype.itemsize)
        return -(-whole // self.pieces)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return 0

    def arrays(
        self, num_pages: int, page_size: int, num_slots: int, dtype: np.dtype[Any], num_snapshots: int = 0
    ) -> Any:
        """Return this layer's entry of the cache on a device, as shapes and dtypes."""
        return jax.ShapeDtypeStruct(_shape(self, -(-num_pages // self.pieces), page_size, dtype), dtype)


def _shape(
    layer: PagedKV | LatentKV, num_pages: int, page_size: int, dtype: np.dtype[Any]
) -> tuple[int, ...]:
    """Return the shape of a layer's array that holds so many pages in `dtype`."""
    return kv_layer_shape(
        num_pages,
        page_size,
        layer.num_kv_heads,
        layer.head_dim,
        keys_only=layer.value_dim is not None,
        is_int8=dtype == _INT8,
        lanes=layer.lanes,
    )


@dataclass(frozen=True, slots=True)
class SlotState:
    """Arrays of these shapes and dtypes for each slot. They are zeros before a request's first position.

    In the cache each array is [STATE_COPIES * slots + snapshots, ...]. A model reads its entries
    `AttentionMeta.state_from`, where those past the end stand for zeros, and writes its entries
    `AttentionMeta.state_to`, where those past the end are dropped. Where `AttentionMeta.state_cut` is above
    0, it also writes the state after so many tokens of the row to the entry `AttentionMeta.state_cut_to`.
    """

    values: tuple[jax.ShapeDtypeStruct, ...]

    def page_bytes(self, page_size: int, dtype: np.dtype[Any]) -> int:
        """Count the bytes of one page, of which this layer has none."""
        return 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return STATE_COPIES * self.snapshot_bytes

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot."""
        return sum(math.prod(value.shape) * value.dtype.itemsize for value in self.values)

    def arrays(
        self, num_pages: int, page_size: int, num_slots: int, dtype: np.dtype[Any], num_snapshots: int = 0
    ) -> Any:
        """Return this layer's entry of the cache, as shapes and dtypes."""
        return tuple(
            jax.ShapeDtypeStruct((STATE_COPIES * num_slots + num_snapshots, *value.shape), value.dtype)
            for value in self.values
        )


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The layers that attend equally far back. Each group has its own number of pages, and page tables."""

    window: int | None
    """How many latest positions, its own included, a token attends to in these layers; None: all."""
    page_bytes: int
    """Bytes of one page in all layers of the group."""
    pieces: int = 1
    """Over how many devices the pages are dealt. There is a multiple of it of them."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The cache of a model."""

    layers: tuple[PagedKV | LatentKV | SlotState, ...]
    kept: range | None = None
    """The entries that these devices keep, of a model that is cut into stages (`models.stages`); in place of
    the others there is (). All stages have the same groups of layers. None: all entries."""

    def only(self, kept: range) -> CacheSpec:
        """Return the same cache on devices that keep these entries alone."""
        return replace(self, kept=kept)

    def keeps(self, entry: int) -> bool:
        """Say whether these devices keep an entry."""
        return self.kept is None or entry in self.kept

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group of layers: None first, if some layers have none, then the largest first. A
        cache without pages has one group, whose pages are numbers without memory.
        """
        found = {layer.window for layer in self.paged}
        whole: tuple[int | None, ...] = (None,) if None in found or not found else ()
        return (*whole, *sorted((window for window in found if window is not None), reverse=True))

    @property
    def group_of(self) -> tuple[int, ...]:
        """For each layer the group whose page table it has; 0 for layers without pages."""
        windows = self.windows
        return tuple(
            0 if isinstance(layer, SlotState) else windows.index(layer.window) for layer in self.layers
        )

    def groups(self, page_size: int, dtype: np.dtype[Any]) -> tuple[CacheGroup, ...]:
        """Return the groups of layers, with the bytes of their pages of keys and values in `dtype`."""
        sizes, pieces = [0] * len(self.windows), [1] * len(self.windows)
        for entry, (layer, group) in enumerate(zip(self.layers, self.group_of, strict=True)):
            sizes[group] += layer.page_bytes(page_size, dtype) if self.keeps(entry) else 0
            if isinstance(layer, LatentKV):
                pieces[group] = layer.pieces
        return tuple(starmap(CacheGroup, zip(self.windows, sizes, pieces, strict=True)))

    @property
    def paged(self) -> tuple[PagedKV | LatentKV, ...]:
        """The layers with pages."""
        return tuple(layer for layer in self.layers if isinstance(layer, PagedKV | LatentKV))

    def check_dtype(self, kv_cache_dtype: str) -> None:
        """Raise ConfigError if int8 is asked for, and there are no keys and values, or heads whose rows in
        int8 cannot be told from columns. The cache must be laid out.
        """
        if kv_cache_dtype != "int8":
            return
        if not self.paged:
            raise ConfigError(
                "kv_cache_dtype: must be auto or left out, not int8: the model has no layers that attend, so "
                "it keeps no keys and values"
            )
        if any(layer.head_dim + SCALE_BYTES == layer.lanes for layer in self.paged):
            raise ConfigError(
                f"kv_cache_dtype: must be auto or left out on TPUs, not int8, for heads of "
                f"{TPU_LANES - SCALE_BYTES} channels"
            )

    def followed_by(self, draft: CacheSpec) -> CacheSpec:
        """Return the cache of a model, the first group of which has no window, and of a draft model without
        state. The draft's layers have the pages of that group, whatever their own windows.
        """
        layers = (
            replace(layer, window=None) if isinstance(layer, PagedKV) else layer for layer in draft.layers
        )
        return CacheSpec((*self.layers, *layers))

    def laid_out(self, lanes: int) -> CacheSpec:
        """Return the same cache with KV rows whose width is a multiple of so many channels, of which those
        behind the model's own are zeros, or, in int8, with columns of so many bytes (`kv_rows`). With
        `GPU_LANES` these are the rows of heads that are multiples of it: no kernel for GPUs reads others in
        int8, so they would only take more memory.
        """

        def own(layer: PagedKV | LatentKV) -> int:
            is_for_gpus = lanes == GPU_LANES
            takes = isinstance(layer, PagedKV) and layer.head_dim % GPU_LANES == 0
            return lanes if takes or not is_for_gpus else 1

        layers = (
            layer if isinstance(layer, SlotState) else replace(layer, lanes=own(layer))
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def has_state(self) -> bool:
        """Whether a layer keeps state by slot."""
        return len(self.paged) < len(self.layers)

    def page_bytes(self, page_size: int, dtype: np.dtype[Any]) -> int:
        """Count the bytes of one page of keys and values in `dtype` in all layers; 0 if no layer has
        pages.
        """
        return sum(layer.page_bytes(page_size, dtype) for layer in self._own)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all layers; 0 if no layer keeps state."""
        return sum(layer.slot_bytes for layer in self._own)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot of a slot's state, in all layers; 0 if no layer keeps state."""
        return sum(layer.snapshot_bytes for layer in self._own if isinstance(layer, SlotState))

    @property
    def _own(self) -> tuple[PagedKV | LatentKV | SlotState, ...]:
        return tuple(layer for entry, layer in enumerate(self.layers) if self.keeps(entry))

    def state_bytes(self, num_slots: int, num_snapshots: int) -> int:
        """Count the bytes of the state of so many slots, with so many snapshots, in all layers."""
        return num_slots * self.slot_bytes + num_snapshots * self.snapshot_bytes

    def arrays(
        self,
        num_pages: Sequence[int],
        page_size: int,
        num_slots: int,
        dtype: np.dtype[Any],
        num_snapshots: int = 0,
    ) -> tuple[Any, ...]:
        """Return the whole cache, as shapes and dtypes, with so many pages in each group. `dtype` is that in
        which keys and values (`cache_dtype`) are stored; state has dtypes of its own.
        """
        return tuple(
            layer.arrays(num_pages[group], page_size, num_slots, dtype, num_snapshots)
            if self.keeps(entry)
            else ()
            for entry, (layer, group) in enumerate(zip(self.layers, self.group_of, strict=True))
        )
