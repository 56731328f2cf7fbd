"""Readers of layers whose codes are small floats: FP8, MXFP4, NVFP4, and bitsandbytes' nf4 and fp4.

N outputs, K inputs. FP8 is E4M3 without infinities (a byte 0x7f or 0xff is no number), FP4 is E2M1, and
MXFP4's scales are E8M0: powers of two (OCP Microscaling Formats, version 1.0).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.runtime.loading.quantised.forms import TableCodes
from penstock.runtime.loading.quantised.layers import (
    FLOATS,
    Layer,
    QuantisedWeight,
    entries_of,
    nibbles,
    share,
)
from penstock.runtime.models.quantised import FloatCodes, float_form

_STATE_BYTES = 4096
"""bitsandbytes' description of a layer has some 200 bytes."""
_TABLES = ("nf4", "fp4")
_STATE = "weight.quant_state.bitsandbytes__"
BITSANDBYTES_MARKS = (
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    *(f"{_STATE}{kind}" for kind in _TABLES),
)
"""What the names of a layer's tensors end in beside "weight"."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """What shares a scale of FP8: `rows` outputs times `columns` inputs; None: all of them."""

    rows: int | None
    columns: int | None


def fp8(layer: Layer, blocks: Blocks, *, scale: str) -> QuantisedWeight:
    """Read weight float8 [N, K], and what to multiply by in the tensor that ends in `scale`: for each block
    [N / rows, K / columns], rounded up, or where a block has all inputs [N / rows], or one for all weights.
    """
    weight = layer.entry("weight", "F8_E4M3")
    outputs, inputs = weight.shape
    rows, group = blocks.rows or outputs, blocks.columns or inputs
    shape: tuple[int, ...] = (-(-outputs // rows), -(-inputs // group))
    found = layer.tensors.get(scale)
    if found is not None and shape[1] == 1 and found.shape in (shape[:1], *((), (1,)) * (shape[0] == 1)):
        shape = found.shape
    scales = layer.entry(scale, *FLOATS, shape=shape)

    def read(begin: int, end: int) -> FloatCodes:
        codes = np.ascontiguousarray(weight[begin:end]).view(np.uint8)
        if ((codes & 0x7F) == 0x7F).any():
            raise layer.problem("weight", "has values that are no numbers")
        of_blocks = layer.finite(scale, share(scales, slice(begin // rows, -(-end // rows))))
        of_rows = of_blocks[np.arange(begin, end) // rows - begin // rows]
        return _in_range(layer, scale, FloatCodes(codes, 8, of_rows, group))

    if blocks.rows is None:
        sharing = "one scale"
    elif blocks.columns is None:
        sharing = "a scale for each output"
    else:
        sharing = f"blocks of {rows} x {group}"
    kept = float_form(8, blocks.columns if group < inputs else None)
    return QuantisedWeight(layer, (outputs, inputs), f"FP8, 8 bits, {sharing}", read, kept)


def fp4(layer: Layer, kind: Literal["mxfp4", "nvfp4"]) -> QuantisedWeight:
    """Read compressed-tensors' FP4: weight_packed uint8 [N, K / 2], the even input in the low half. MXFP4 has
    weight_scale uint8 [N, K / 32], whose b means 2 ** (b - 127). NVFP4 has weight_scale float8 [N, K / 16],
    and weight_global_scale [1], by which they are divided.
    """
    halves = layer.entry("weight_packed", "U8")
    outputs, inputs = halves.shape[0], 2 * halves.shape[1]
    group = layer.groups("weight_packed", inputs, 32 if kind == "mxfp4" else 16)
    scale_dtype = "U8" if kind == "mxfp4" else "F8_E4M3"
    scales = layer.entry("weight_scale", scale_dtype, shape=(outputs, inputs // group))
    divisor = np.float32(1)
    if kind == "nvfp4":
        whole = layer.entry("weight_global_scale", "F32", shape=(1,))
        divisor = layer.finite("weight_global_scale", entries_of(whole))[0]
        if divisor == 0:
            raise layer.problem("weight_global_scale", "is 0, by which scales would be divided")

    def read(begin: int, end: int) -> FloatCodes:
        stored = np.ascontiguousarray(scales[begin:end])
        if kind == "mxfp4":
            if (stored == 255).any():
                raise layer.problem("weight_scale", "has scales that are no numbers")
            of_groups = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
        else:
            of_groups = layer.finite("weight_scale", stored) / divisor
        codes = FloatCodes(nibbles(np.ascontiguousarray(halves[begin:end])), 4, of_groups, group)
        return _in_range(layer, "weight_scale", codes)

    form = f"{'MXFP4' if kind == 'mxfp4' else 'NVFP4'}, 4 bits, groups of {group}"
    kept = float_form(4, group) if kind == "mxfp4" else None
    return QuantisedWeight(layer, (outputs, inputs), form, read, kept)


def bitsandbytes_4bit(layer: Layer) -> QuantisedWeight:
    """Read weight uint8 [N * K / 2, 1], the first of two codes in the high half; weight.quant_map [16], the
    values of codes; weight.absmax, a scale for each block of the flattened weight; and a JSON of sizes. With
    double quantisation absmax are codes themselves, of weight.nested_quant_map [256], with scales
    weight.nested_absmax, and an offset in the JSON.
    """
    kinds = [kind for kind in _TABLES if f"{_STATE}{kind}" in layer]
    state_at = f"{_STATE}{kinds[0] if kinds else 'nf4'}"
    if (size := math.prod(layer.tensors[state_at].shape) if kinds else 0) > _STATE_BYTES:
        raise layer.problem(state_at, f"has {size} bytes, more than {_STATE_BYTES}")
    state = _State.read(layer, state_at)
    outputs, inputs, block = state.outputs, state.inputs, state.block
    weight = layer.entry("weight", "U8", shape=(outputs * inputs // 2, 1))
    table = layer.finite("weight.quant_map", entries_of(layer.entry("weight.quant_map", "F32", shape=(16,))))
    peaks = _peaks(layer, state, -(-outputs * inputs // block))
    group = math.gcd(inputs, block)

    def read(begin: int, end: int) -> TableCodes:
        halves = np.ascontiguousarray(weight[begin * inputs // 2 : end * inputs // 2]).reshape(-1)
        # The first code of a byte is in the high half.
        codes = nibbles(halves).reshape(-1, 2)[:, ::-1].reshape(end - begin, inputs)
        of_groups = peaks[np.arange(begin * inputs, end * inputs, group) // block]
        rows = TableCodes(codes, table, of_groups.reshape(end - begin, -1), group)
        return _not_lost(layer, "weight.absmax", rows)

    form = f"bitsandbytes {kinds[0]}, 4 bits, groups of {block}"
    return QuantisedWeight(layer, (outputs, inputs), form, read)


@dataclass(frozen=True, slots=True)
class _State:
    """What bitsandbytes' JSON says of a layer."""

    outputs: int
    inputs: int
    block: int
    nested_block: int | None
    """Blocks that share a scale of their scales; None: scales are not quantised."""
    nested_offset: float

    @staticmethod
    def read(layer: Layer, ending: str) -> _State:
        """Read the JSON; its sizes are checked one by one."""
        entry = layer.entry(ending, "U8", shape=layer.tensors[ending].shape if ending in layer else None)
        try:
            told: Any = json.loads(entries_of(entry).tobytes())
            outputs, inputs = told["shape"]
            block, nested = told["blocksize"], told.get("nested_blocksize")
            offset = float(told.get("nested_offset") or 0.0)
            sizes = (outputs, inputs, block, *(() if nested is None else (nested,)))
            if not all(type(size) is int and size > 0 for size in sizes) or not math.isfinite(offset):
                raise ValueError("its sizes must be integers above 0")
            if told["quant_type"] != ending.removeprefix(_STATE):
                raise ValueError(f"it says {told['quant_type']!r}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise layer.problem(ending, f"cannot be read ({error!r})") from error
        if inputs % 2:
            raise layer.problem(ending, f"says {inputs} inputs, which is odd, and not supported")
        return _State(outputs, inputs, block, nested, offset)


def _peaks(layer: Layer, state: _State, count: int) -> npt.NDArray[np.float32]:
    """Compute the scale of each block."""
    if state.nested_block is None:
        return layer.finite("weight.absmax", entries_of(layer.entry("weight.absmax", "F32", shape=(count,))))
    stored = entries_of(layer.entry("weight.absmax", "U8", shape=(count,)))
    outer_count = -(-count // state.nested_block)
    outer = layer.entry("weight.nested_absmax", "F32", shape=(outer_count,))
    table = layer.entry("weight.nested_quant_map", "F32", shape=(256,))
    of_outer = layer.finite("weight.nested_absmax", entries_of(outer))
    values = layer.finite("weight.nested_quant_map", entries_of(table))[stored]
    with np.errstate(over="ignore", invalid="ignore"):
        peaks = values * of_outer[np.arange(count) // state.nested_block]
        return layer.finite("weight.nested_absmax", peaks + np.float32(state.nested_offset))


def _in_range(layer: Layer, ending: str, rows: FloatCodes) -> FloatCodes:
    """Give the rows. Raises ConfigError if a scale makes nothing, or infinite values, of codes."""
    if not rows.is_in_range:
        raise layer.problem(ending, "and its codes make values that are infinite")
    return _not_lost(layer, ending, rows)


_F = TypeVar("_F", FloatCodes, TableCodes)


def _not_lost(layer: Layer, ending: str, rows: _F) -> _F:
    """Give the rows. Raises ConfigError if a scale of 0 makes nothing of values that are not 0."""
    lost = rows.scales == 0
    if lost.any():
        inputs = rows.codes.shape[1]
        of_inputs = np.repeat(lost, rows.group, axis=1)[:, :inputs]
        if replace(rows, scales=np.ones_like(rows.scales)).dequantised()[of_inputs].any():
            raise layer.problem(ending, "has a scale of 0 where weights are not 0")
    return rows
