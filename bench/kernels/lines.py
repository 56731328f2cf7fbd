"""What is measured: the products and the attention of decoders of published shapes, each with the operations
and bytes that it needs at least. Pure values.

A product needs its weights (and, in int8, their scales) once; activations are left out, because the caches
may hold them. Attention needs the keys and values that it attends to once. A multiply-add counts as two
operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from bench.measures.cost import Machine, Work
from bench.measures.limits import Format, Multiplied
from penstock.runtime.ops.codes import E2M1, E4M3_BY_GROUP, NESTED_FORMS, CodeForm
from penstock.runtime.ops.kv_rows import SCALE_BYTES
from penstock.runtime.ops.native.library import Isa

CHUNK = 512
"""Tokens of a prefill step."""
_WEIGHT_SCALE_BYTES = 4
"""Of an output of an int8 weight."""

CODES: Mapping[Format, CodeForm] = MappingProxyType(
    {
        "int4": CodeForm(bits=4),
        "q4_k": NESTED_FORMS[0],
        "q6_k": NESTED_FORMS[1],
        "mxfp4": E2M1,
        "fp8": E4M3_BY_GROUP,
    }
)
"""How weights of these formats are kept."""

Kind = Literal["product", "decode", "prefill"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder that its kernels depend on."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def cache_values(self) -> int:
        """Numbers of each token in a layer's cache."""
        return 2 * self.kv_heads * self.head_dim


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "0.6B": Shape(1024, 3072, 16, 8, 128),
        "4B": Shape(2560, 9728, 32, 8, 128),
        "8B": Shape(4096, 12288, 32, 8, 128),
    }
)
"""Qwen3-0.6B, Qwen3-4B and Qwen3-8B."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of a layer, as the model calls it: with what is fused into it."""

    name: str
    outputs: int
    inputs: int
    norm: bool = False
    gated: bool = False
    residual: bool = False


def products(shape: Shape) -> tuple[Product, ...]:
    """Return the four products of a layer."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return (
        Product("qkv", queries + 2 * keys, shape.hidden, norm=True),
        Product("o", shape.hidden, queries, residual=True),
        Product("gate+up", 2 * shape.inner, shape.hidden, norm=True, gated=True),
        Product("down", shape.hidden, shape.inner, residual=True),
    )


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that is measured. `rows` are those of the step; each has `context` tokens, its last one
    included (0 for products). In prefill the one row has `CHUNK` new tokens.
    """

    kind: Kind
    shape: str
    part: str
    format: Format
    """Of the weights, or of the cache."""
    rows: int
    context: int
    work: Work
    """Of one call."""

    def multiplied(self, isa: Isa) -> Multiplied:
        """Name what the kernel for an instruction set multiplies. Integers of fewer bits are widened to int8,
        and small floats to bfloat16. With int8 weights AMX multiplies both bytes of activations of 16 bits,
        which takes as many products as bfloat16 does. Attention widens an int8 cache: AMX's to bfloat16, the
        others to int16.
        """
        if self.kind == "product":
            floats = ("bfloat16", "mxfp4", "fp8", *(("int8",) if isa == Isa.AMX else ()))
            return "bfloat16" if self.format in floats else "int8"
        if self.format == "bfloat16":
            return self.format
        return "bfloat16" if isa == Isa.AMX else "int16"


def product_line(shape: str, product: Product, format: Format, rows: int) -> Line:
    weights = product.outputs * product.inputs
    size = 2.0 * weights if format == "bfloat16" else weights + float(_WEIGHT_SCALE_BYTES * product.outputs)
    if format in CODES:
        size = float(math.prod(CODES[format].shape(product.outputs, product.inputs)))
    return Line("product", shape, product.name, format, rows, 0, Work(2.0 * weights * rows, size))


def decode_line(shape: str, format: Format, rows: int, context: int) -> Line:
    pairs = rows * context
    return Line("decode", shape, "attention", format, rows, context, _attention(shape, format, pairs, pairs))


def prefill_line(shape: str, format: Format, context: int) -> Line:
    """Raise ValueError for a context that is shorter than a chunk."""
    if context < CHUNK:
        raise ValueError(f"context: a chunk has {CHUNK} tokens, more than {context}")
    pairs = CHUNK * (context - CHUNK) + CHUNK * (CHUNK + 1) // 2
    return Line("prefill", shape, "attention", format, 1, context, _attention(shape, format, pairs, context))


def _attention(name: str, format: Format, pairs: int, read: int) -> Work:
    """Count the work of attention: `pairs` of a token and a position that it attends to; `read` positions of
    the cache.
    """
    shape = SHAPES[name]
    position = 2.0 * shape.cache_values
    if format == "int8":
        position = shape.cache_values + 2.0 * shape.kv_heads * SCALE_BYTES
    return Work(4.0 * shape.heads * shape.head_dim * pairs, position * read)


@dataclass(frozen=True, slots=True)
class Result:
    """A line, measured by one instruction set (or a rival), and the limits that it is compared with."""

    line: Line
    by: str
    seconds: float
    """Of one call."""
    machine: Machine

    @property
    def least_s(self) -> float:
        """The time that the machine's limits allow."""
        return self.machine.seconds(self.line.work)

    @property
    def share(self) -> float:
        """Of the limit that binds: 1 is as fast as the machine can be."""
        return self.least_s / self.seconds

    @property
    def binds(self) -> Literal["memory", "multiplying"]:
        reading = self.line.work.bytes_read / self.machine.bytes_per_s
        return (
            "memory"
            if reading >= self.line.work.operations / self.machine.operations_per_s
            else "multiplying"
        )


def layer(results: list[Result]) -> Result:
    """Join the products of a layer in one line. Its limit is that of all of them together, which is not above
    the sum of their limits: each multiplies and reads as fast as the machine could when it was measured.
    """
    work = sum((result.line.work for result in results), Work(0, 0))
    multiplying = sum(result.line.work.operations / result.machine.operations_per_s for result in results)
    reading = sum(result.line.work.bytes_read / result.machine.bytes_per_s for result in results)
    return Result(
        replace(results[0].line, part="layer", work=work),
        results[0].by,
        sum(result.seconds for result in results),
        Machine(work.operations / multiplying, work.bytes_read / reading),
    )
