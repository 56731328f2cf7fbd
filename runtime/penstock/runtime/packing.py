"""The one int32 buffer that goes to the device each step: its layout, filled with numpy, taken apart in the
program.

One transfer costs what eight small ones cost each; floats travel as their bits. Sections, in order: header,
input tokens [T], row fields [R, NUM_FIELDS], ids that end the row [R, MAX_STOP_TOKEN_IDS], page tables [R,
P].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from penstock.runtime.buckets import ProgramKey
from penstock.runtime.request import MAX_STOP_TOKEN_IDS, SamplingParams
from penstock.runtime.sampler import SamplingRows

HEADER = 3
ANY_SAMPLING, ANY_LOGPROBS, NUM_STEPS = range(HEADER)
_STEP_FIELDS = 5
SLOT, START, NUM_TOKENS, MAX_SAMPLES, BANS = range(_STEP_FIELDS)
PARAM_FIELDS = (
    6  # temperature, top_k, top_p, min_p, seed high, seed low: constant while a request holds its slot
)
NUM_FIELDS = _STEP_FIELDS + PARAM_FIELDS
FEEDBACK = -1
"""Input token that stands for "the token this row's slot sampled last"."""

Ints = NDArray[np.int32]
Buffer = TypeVar("Buffer", Ints, Array)


def pack_params(params: SamplingParams) -> Ints:
    """The constant fields of a row, int32[PARAM_FIELDS]. The engine has drawn a seed where the caller set
    none.
    """
    seed = params.seed or 0
    floats = np.array([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
    words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    return np.array([floats[0], params.top_k, floats[1], floats[2], words[0], words[1]], np.int32)


class Unpacked(NamedTuple):
    """The step's inputs on the device; T tokens, R rows, P pages a row."""

    any_sampling: Array  # bool[]
    any_logprobs: Array  # bool[]
    num_steps: Array  # int32[]
    tokens: Array  # int32[T]
    slots: Array  # int32[R]; max_num_seqs for padding rows
    starts: Array  # int32[R]
    q_lens: Array  # int32[R]
    max_samples: Array  # int32[R] most tokens the row makes; 0 for a prefill chunk that is not the last
    bans: Array  # int32[R] how many of them must not be among stop_ids
    sampling: SamplingRows
    stop_ids: Array  # int32[R, MAX_STOP_TOKEN_IDS] EOS and stop ids; vocabulary size where unused
    page_table: Array  # int32[R, P]


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of the packed buffer of one program."""

    key: ProgramKey
    pages_per_row: int

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        """Header, tokens, row fields, stop ids, page tables: the one place that says what stands where."""
        rows = self.key.rows
        return (
            (HEADER,),
            (self.key.tokens,),
            (rows, NUM_FIELDS),
            (rows, MAX_STOP_TOKEN_IDS),
            (rows, self.pages_per_row),
        )

    @property
    def size(self) -> int:
        """Length of the buffer in int32 words."""
        return sum(map(math.prod, self._shapes))

    def views(self, buffer: Buffer) -> tuple[Buffer, Buffer, Buffer, Buffer, Buffer]:
        """Header, tokens, row fields, stop ids, page tables: views of a host buffer, slices on a device."""
        parts, at = [], 0
        for shape in self._shapes:
            size = math.prod(shape)
            parts.append(buffer[at : at + size].reshape(shape))
            at += size
        header, tokens, fields, stop_ids, tables = parts
        return header, tokens, fields, stop_ids, tables

    def unpack(self, packed: Array) -> Unpacked:
        """The same sections inside the program."""
        header, tokens, fields, stop_ids, tables = self.views(packed)

        def floats(column: int) -> Array:
            return lax.bitcast_convert_type(fields[:, column], jnp.float32)

        first = _STEP_FIELDS
        sampling = SamplingRows(
            temperature=floats(first),
            top_k=fields[:, first + 1],
            top_p=floats(first + 2),
            min_p=floats(first + 3),
            seed=lax.bitcast_convert_type(fields[:, first + 4 : first + 6], jnp.uint32),
            positions=fields[:, START] + fields[:, NUM_TOKENS],
        )
        return Unpacked(
            any_sampling=header[ANY_SAMPLING] != 0,
            any_logprobs=header[ANY_LOGPROBS] != 0,
            num_steps=header[NUM_STEPS],
            tokens=tokens,
            slots=fields[:, SLOT],
            starts=fields[:, START],
            q_lens=fields[:, NUM_TOKENS],
            max_samples=fields[:, MAX_SAMPLES],
            bans=fields[:, BANS],
            sampling=sampling,
            stop_ids=stop_ids,
            page_table=tables,
        )
