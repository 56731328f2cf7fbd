"""Readers of layers whose codes are integers: AWQ, GPTQ, compressed-tensors, bitsandbytes' int8, MLX and
torchao.

N outputs, K inputs, G inputs in a group. Formulas and layouts are those of the projects' own packing code
(AutoAWQ, GPTQModel, compressed-tensors, bitsandbytes, MLX, torchao), which tests compare with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.runtime.loading.quantised.layers import (
    FLOATS,
    Layer,
    QuantisedWeight,
    check_lost,
    columns,
    entries_of,
    kept_as,
    nibbles,
    order_of,
    share,
    unpacked,
)
from penstock.runtime.loading.safetensors_files import TensorEntry
from penstock.runtime.models.quantised import Codes, OffsetCodes

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where output i of eight lies among the codes of an AWQ word."""
_BNB_STEP = np.float32(1 / 127)


@dataclass(frozen=True, slots=True)
class Integers:
    """What a config says of the integers of a layer."""

    bits: int
    group: int | None
    """Inputs that share a scale; None: all."""
    symmetric: bool
    """Whether the zero is the middle of the codes."""


def _form(kind: str, scheme: Integers, *, zeros: bool, ordered: bool = False) -> str:
    """Say what a weight is, for people."""
    scales = "a scale for each output" if scheme.group is None else f"groups of {scheme.group}"
    bits = scheme.bits
    return f"{kind}, {bits} bits, {scales}{' with zeros' * zeros}{', in an order of their own' * ordered}"


def awq(layer: Layer, scheme: Integers) -> QuantisedWeight:
    """Read qweight [K, N / 8], qzeros [K / G, N / 8], scales [K / G, N]: a word has eight outputs of one
    input, in an order of its own.
    """
    qweight = layer.entry("qweight", "I32")
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    group = layer.groups("qweight", inputs, scheme.group)
    qzeros = layer.entry("qzeros", "I32", shape=(inputs // group, outputs // 8))
    scales = layer.entry("scales", *FLOATS, shape=(inputs // group, outputs))

    def outputs_of(words: npt.NDArray[Any], begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Turn [in, words] -> [end - begin, in]."""
        eights = unpacked(words, 4).reshape(len(words), -1, 8)[:, :, _AWQ_ORDER]
        return np.ascontiguousarray(eights.reshape(len(words), -1)[:, begin:end].T)

    def read(begin: int, end: int) -> Codes:
        first, last = begin // 8, -(-end // 8)
        within = (begin - 8 * first, end - 8 * first)
        codes = Codes(
            codes=outputs_of(qweight.map()[:, first:last], *within),
            bits=4,
            scales=layer.finite("scales", columns(scales, begin, end)),
            zeros=outputs_of(qzeros.map()[:, first:last], *within).astype(np.float32),
            group=group,
        )
        return check_lost(layer, "scales", codes)

    return QuantisedWeight(
        layer,
        (outputs, inputs),
        _form("AWQ", scheme, zeros=True),
        read,
        kept_as(4, group, scales, zeros=True),
    )


def gptq(layer: Layer, scheme: Integers, *, version: int, ordered: bool) -> QuantisedWeight:
    """Read qweight [K * bits / 32, N], qzeros [K / G, N * bits / 32], scales [K / G, N], g_idx [K]: a word
    has inputs of one output, and of zeros outputs.

    `version`: 1 stores zeros less 1. `ordered`: whether the inputs of a group may lie apart.
    """
    bits, per_word = scheme.bits, 32 // scheme.bits
    qweight = layer.entry("qweight", "I32")
    inputs, outputs = qweight.shape[0] * per_word, qweight.shape[1]
    if outputs % per_word:
        raise layer.problem("qweight", f"has {outputs} outputs, no multiple of {per_word}")
    group = layer.groups("qweight", inputs, scheme.group)
    qzeros = layer.entry("qzeros", "I32", shape=(inputs // group, outputs // per_word))
    scales = layer.entry("scales", *FLOATS, shape=(inputs // group, outputs))
    order = order_of(layer, "g_idx", inputs, group) if "g_idx" in layer or ordered else None
    if order is not None and not ordered:
        raise layer.problem("g_idx", "has groups whose inputs lie apart, but desc_act is false")

    def zeros_of(begin: int, end: int) -> npt.NDArray[np.uint8]:
        first = begin // per_word
        words = np.asarray(qzeros.map()[:, first : -(-end // per_word)])
        return unpacked(words, bits)[:, begin - first * per_word : end - first * per_word].T

    def read(begin: int, end: int) -> Codes:
        values: npt.NDArray[Any] = unpacked(columns(qweight, begin, end), bits)
        stored, middle = zeros_of(begin, end), 1 << (bits - 1)
        zeros: npt.NDArray[np.float32] | None = None
        if scheme.symmetric:
            # Some files of version 2 are labelled as version 1; here both mean the middle.
            if not ((stored == stored.flat[0]).all() and stored.flat[0] in (middle - 1, middle)):
                raise layer.problem("qzeros", f"has other zeros than {middle}, but sym is true")
            values = _signed(values, bits)
        else:
            if version == 1 and (stored == 2 * middle - 1).any():
                raise layer.problem(
                    "qzeros",
                    f"has {2 * middle - 1}, which stands for 0 or for {2 * middle} in checkpoint_format "
                    "'gptq'; convert it to gptq_v2",
                )
            zeros = np.ascontiguousarray(stored.astype(np.float32) + np.float32(version == 1))
        codes = Codes(
            codes=values if order is None else values[:, order],
            bits=bits,
            scales=layer.finite("scales", columns(scales, begin, end)),
            zeros=zeros,
            group=group,
            order=order,
        )
        return check_lost(layer, "scales", codes)

    traits = {"zeros": not scheme.symmetric, "ordered": order is not None}
    form, kept = _form("GPTQ", scheme, **traits), kept_as(bits, group, scales, **traits)
    return QuantisedWeight(layer, (outputs, inputs), form, read, kept)


def packed(layer: Layer, scheme: Integers) -> QuantisedWeight:
    """Read compressed-tensors' pack-quantized: weight_packed [N, K * bits / 32], weight_shape [2],
    weight_scale [N, K / G], weight_zero_point [N * bits / 32, K / G], weight_g_idx [K]. Codes and zeros are
    stored with half of their range added.
    """
    bits, per_word = scheme.bits, 32 // scheme.bits
    words = layer.entry("weight_packed", "I32")
    told = entries_of(layer.entry("weight_shape", "I64", "I32", shape=(2,))).tolist()
    outputs, inputs = words.shape[0], int(told[1])
    if told[0] != outputs or inputs < 1 or -(-inputs // per_word) != words.shape[1]:
        raise layer.problem("weight_shape", f"says {told}, but weight_packed has {list(words.shape)} words")
    group = layer.groups("weight_packed", inputs, scheme.group)
    scales = _scales(layer, outputs, inputs // group)
    zeros = None
    if not scheme.symmetric:
        zeros = _packed_zeros(layer, bits, outputs, inputs // group)
    elif "weight_zero_point" in layer:
        raise layer.problem("weight_zero_point", "is there, but symmetric is true")
    order = order_of(layer, "weight_g_idx", inputs, group) if "weight_g_idx" in layer else None

    def read(begin: int, end: int) -> Codes:
        values = _signed(unpacked(words[begin:end], bits)[:, :inputs], bits)
        codes = Codes(
            codes=values if order is None else values[:, order],
            bits=bits,
            scales=_of_groups(layer.finite("weight_scale", share(scales, slice(begin, end))), inputs, group),
            zeros=None if zeros is None else zeros[begin:end],
            group=group,
            order=order,
        )
        return check_lost(layer, "weight_scale", codes)

    traits = {"zeros": zeros is not None, "ordered": order is not None}
    form, kept = _form("compressed-tensors", scheme, **traits), kept_as(bits, group, scales, **traits)
    return QuantisedWeight(layer, (outputs, inputs), form, read, kept)


def _packed_zeros(layer: Layer, bits: int, outputs: int, groups: int) -> npt.NDArray[np.float32]:
    """Read the zeros of all outputs, [N, K / G]. They are packed along the outputs; some files have one in
    each entry.
    """
    if "weight_zero_point" in layer and layer.tensors["weight_zero_point"].shape == (outputs, groups):
        entry = layer.entry("weight_zero_point", "I8", shape=(outputs, groups))
        return np.asarray(entry.map()).astype(np.float32)
    rows = -(-outputs * bits // 32)
    entry = layer.entry("weight_zero_point", "I32", shape=(rows, groups))
    stored = unpacked(np.asarray(entry.map()).T, bits)[:, :outputs]
    return np.ascontiguousarray(_signed(stored, bits).T.astype(np.float32))


def plain_integers(layer: Layer, scheme: Integers) -> QuantisedWeight:
    """Read compressed-tensors' int-quantized and naive-quantized: weight int8 [N, K], weight_scale
    [N, K / G], and weight_zero_point of the same shape.
    """
    weight = layer.entry("weight", "I8")
    outputs, inputs = weight.shape
    group = layer.groups("weight", inputs, scheme.group)
    scales, zeros = _scales(layer, outputs, inputs // group), None
    if not scheme.symmetric:
        zeros = layer.entry("weight_zero_point", "I8", *FLOATS, shape=scales.shape)

    def read(begin: int, end: int) -> Codes:
        rows = slice(begin, end)
        codes = Codes(
            codes=np.ascontiguousarray(weight[rows]),
            bits=8,
            scales=_of_groups(layer.finite("weight_scale", share(scales, rows)), inputs, group),
            zeros=None
            if zeros is None
            else _of_groups(layer.finite("weight_zero_point", share(zeros, rows)), inputs, group),
            group=group,
        )
        return check_lost(layer, "weight_scale", codes)

    form = _form("compressed-tensors", scheme, zeros=zeros is not None)
    has_integers = zeros is None or zeros.dtype.kind == "i"
    kept = kept_as(8, group, scales, zeros=zeros is not None) if has_integers else None
    return QuantisedWeight(layer, (outputs, inputs), form, read, kept)


def bitsandbytes_int8(layer: Layer) -> QuantisedWeight:
    """Read weight int8 [N, K], SCB float32 [N], weight_format []: value = code * SCB / 127."""
    weight = layer.entry("weight", "I8")
    outputs, inputs = weight.shape
    peaks = layer.entry("SCB", "F32", shape=(outputs,))
    if "weight_format" in layer:
        form = entries_of(layer.entry("weight_format", "U8", shape=layer.tensors["weight_format"].shape))
        if form.tolist() != [0]:
            raise layer.problem("weight_format", f"is {form.tolist()}; only 0, rows, is supported")

    def read(begin: int, end: int) -> Codes:
        scales = layer.finite("SCB", peaks[begin:end])[:, None] * _BNB_STEP
        codes = Codes(np.ascontiguousarray(weight[begin:end]), 8, scales, None, inputs)
        return check_lost(layer, "SCB", codes)

    return QuantisedWeight(
        layer, (outputs, inputs), _form("bitsandbytes", Integers(8, None, True), zeros=False), read
    )


def mlx(layer: Layer, scheme: Integers) -> QuantisedWeight:
    """Read weight uint32 [N, K * bits / 32], scales and biases [N, K / G]: value = code * scale + bias."""
    bits = scheme.bits
    words = layer.entry("weight", "U32")
    outputs, inputs = words.shape[0], words.shape[1] * (32 // bits)
    group = layer.groups("weight", inputs, scheme.group)
    shape = (outputs, inputs // group)
    scales = layer.entry("scales", *FLOATS, shape=shape)
    biases = layer.entry("biases", *FLOATS, shape=shape)

    def read(begin: int, end: int) -> OffsetCodes:
        return OffsetCodes(
            codes=unpacked(words[begin:end], bits),
            bits=bits,
            scales=layer.finite("scales", scales[begin:end]),
            offsets=layer.finite("biases", biases[begin:end]),
            group=group,
        )

    form, kept = _form("MLX", scheme, zeros=True), kept_as(bits, group, scales, biases, minima=True)
    return QuantisedWeight(layer, (outputs, inputs), form, read, kept)


def torchao(layer: Layer) -> QuantisedWeight:
    """Read torchao's tensors, whose class and sizes of groups a file tells in JSON. Int8Tensor and
    IntxUnpackedToInt8Tensor have _weight_qdata int8 [N, K], and _weight_scale and _weight_zero_point
    [N, K / G]. Int4Tensor has _weight_qdata [N, K / 2], the even input in the low half, and the other two
    [K / G, N], of which the second is added to values.
    """
    first = min(layer.tensors)
    try:
        told = json.loads(layer.told)
        kind, (rows, group) = told["_type"], told["_data"]["block_size"]
        if not all(type(size) is int and size > 0 for size in (rows, group)):
            raise ValueError("sizes must be integers above 0")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise layer.problem(first, f"is not described in the file's metadata ({error!r})") from error
    if kind not in ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor"):
        raise layer.problem(first, f"is a {kind}, which is not supported; compressed-tensors' formats are")
    for ending in ("_weight_act_pre_scale", "_weight_act_quant_zero_point"):
        if ending in layer:
            raise layer.problem(ending, "is not supported")
    if kind == "Int4Tensor":
        return _torchao_int4(layer, group)
    qdata = layer.entry("_weight_qdata", "I8")
    outputs, inputs = qdata.shape
    if rows not in (1, outputs) or inputs % group or (rows == outputs > 1 and group != inputs):
        raise layer.problem("_weight_qdata", f"has shape {[outputs, inputs]}, but blocks of {[rows, group]}")
    shape = (outputs // rows, inputs // group)
    scales, zeros = layer.entry("_weight_scale", *FLOATS, shape=shape), None
    if "_weight_zero_point" in layer:
        zeros = layer.entry("_weight_zero_point", "I8", "I32", "I64", *FLOATS, shape=shape)

    def read(begin: int, end: int) -> Codes:
        part = slice(begin, end)

        def of_groups(ending: str, entry: TensorEntry) -> npt.NDArray[np.float32]:
            return _of_groups(layer.finite(ending, share(entry, part)), inputs, group)

        codes = Codes(
            codes=np.ascontiguousarray(qdata[part]),
            bits=8,
            scales=of_groups("_weight_scale", scales),
            zeros=None if zeros is None else of_groups("_weight_zero_point", zeros),
            group=group,
        )
        return check_lost(layer, "_weight_scale", codes)

    form = _form(
        "torchao", Integers(8, None if group == inputs else group, zeros is None), zeros=zeros is not None
    )
    # Only a zero in int8 is sure to be one that float16 has.
    has_small = zeros is None or zeros.dtype == np.int8
    kept = kept_as(8, group, scales, zeros=zeros is not None) if has_small else None
    return QuantisedWeight(layer, (outputs, inputs), form, read, kept)


def _torchao_int4(layer: Layer, group: int) -> QuantisedWeight:
    halves = layer.entry("_weight_qdata", "I8", "U8")
    outputs, inputs = halves.shape[0], 2 * halves.shape[1]
    shape = (inputs // layer.groups("_weight_qdata", inputs, group), outputs)
    scales = layer.entry("_weight_scale", *FLOATS, shape=shape)
    offsets = layer.entry("_weight_zero_point", *FLOATS, shape=shape)

    def read(begin: int, end: int) -> OffsetCodes:
        stored = nibbles(np.ascontiguousarray(halves[begin:end]).view(np.uint8))
        return OffsetCodes(
            codes=_signed(stored ^ np.uint8(8), 4),  # in two's complement
            bits=4,
            scales=layer.finite("_weight_scale", columns(scales, begin, end)),
            offsets=layer.finite("_weight_zero_point", columns(offsets, begin, end)),
            group=group,
        )

    # It is not kept: bytes that hold minima have codes from 0 on. The minimum for these, 8 scales less the
    # offset, is none that float16 has.
    form = _form("torchao", Integers(4, group, False), zeros=True)
    return QuantisedWeight(layer, (outputs, inputs), form, read)


def _signed(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int8]:
    """Return codes less the half of their range."""
    return (codes ^ (1 << (bits - 1))).view(np.int8) if bits == 8 else codes.astype(np.int8) - np.int8(8)


def _scales(layer: Layer, outputs: int, groups: int) -> TensorEntry:
    """Return the entry of weight_scale: for each output and group, or one for all weights."""
    found = layer.tensors.get("weight_scale")
    shape: tuple[int, ...] = (outputs, groups)
    if found is not None and groups == 1 and found.shape in ((), (1,), (1, 1), (outputs,)):
        shape = found.shape
    return layer.entry("weight_scale", *FLOATS, shape=shape)


def _of_groups(values: npt.NDArray[np.float32], inputs: int, group: int) -> npt.NDArray[np.float32]:
    """Return values [out, 1] or [out, groups] as [out, groups]."""
    return np.ascontiguousarray(np.broadcast_to(values, (len(values), inputs // group)))
