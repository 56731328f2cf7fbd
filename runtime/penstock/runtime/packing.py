"""The one int32 buffer that goes to the device each step: its layout, filled with numpy, taken apart in the
program.

One transfer costs what eight small ones cost each; floats travel as their bits. Sections, in order: header,
row fields [R, NUM_FIELDS], ids that end the row [R, MAX_STOP_TOKEN_IDS], input tokens [T]. The first three
are all that sampling needs, so that one sampling program per number of rows serves steps of any number of
tokens. Page tables stay on the device: a row's fields tell the one entry that is new, which is all that a
decode ever adds, and whoever enters sends its table beforehand (`request_programs.make_table_rows`).
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
from penstock.runtime.request import MAX_STOP_TOKEN_IDS, Request, SamplingParams
from penstock.runtime.sampler import SamplingRows
from penstock.runtime.sampling_codes import BIAS, LOGPROBS, PENALTIES, SAMPLING

HEADER = 2
FLAGS, NUM_STEPS = range(HEADER)
PARAMS = 7
SLOT, START, NUM_TOKENS, MAX_SAMPLES, BANS, PAGE_INDEX, PAGE = range(PARAMS)
"""Fields of the step; behind them, from PARAMS on, those of the request."""
PARAM_FIELDS = 12
"""Constant while a request holds its slot; in the order of `pack_params`."""
NUM_FIELDS = PARAMS + PARAM_FIELDS
FEATURES = PARAMS
"""The first of them; a row's bits of the header's flags."""
FEEDBACK = -1
"""Input token that stands for "the token this row's slot sampled last"."""
_MOST_PENALTY = 1e30

Ints = NDArray[np.int32]
Buffer = TypeVar("Buffer", Ints, Array)


def row_features(request: Request) -> int:
    """What the sampler must look at for this request."""
    sampling = request.sampling
    return (
        PENALTIES * sampling.has_penalties
        | BIAS * sampling.has_bias
        | SAMPLING * (not sampling.greedy)
        | LOGPROBS * (request.logprobs is not None)
    )


def pack_params(request: Request, feature_slot: int = 0) -> Ints:
    """The constant fields of a row, int32[PARAM_FIELDS]. The engine has drawn a seed where the caller set
    none; without penalties and bias no feature slot is looked at.
    """
    params: SamplingParams = request.sampling
    seed = params.seed or 0
    floats = np.array(
        [
            params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            # Neither it nor what it makes of a logit may leave the range of float32.
            min(max(params.repetition_penalty, 1 / _MOST_PENALTY), _MOST_PENALTY),
        ],
        np.float32,
    ).view(np.int32)
    seeds = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    num_logprobs = -1 if request.logprobs is None else request.logprobs
    ints = (row_features(request), num_logprobs, params.top_k)
    return np.array([*ints, *floats, *seeds, feature_slot], np.int32)


class Unpacked(NamedTuple):
    """The step's inputs on the device, but for tokens and page tables; R rows."""

    flags: Array  # int32[] bits of what any row has
    num_steps: Array  # int32[]
    starts: Array  # int32[R]
    q_lens: Array  # int32[R]
    max_samples: Array  # int32[R] most tokens the row makes; 0 for a prefill chunk that is not the last
    bans: Array  # int32[R] how many of them must not be among the stop ids
    page_indices: Array  # int32[R] entry of the row's page table that is new; P or above: none
    pages: Array  # int32[R] what it becomes
    sampling: SamplingRows


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of the packed buffer of one program."""

    key: ProgramKey

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        """Header, row fields, stop ids, tokens: the one place that says what stands where."""
        rows = self.key.rows
        return (HEADER,), (rows, NUM_FIELDS), (rows, MAX_STOP_TOKEN_IDS), (self.key.tokens,)

    @property
    def size(self) -> int:
        """Length of the buffer in int32 words."""
        return sum(map(math.prod, self._shapes))

    @property
    def rows_size(self) -> int:
        """Length of its first part, up to the tokens."""
        return sum(map(math.prod, self._shapes[:3]))

    def views(self, buffer: Buffer) -> tuple[Buffer, Buffer, Buffer, Buffer]:
        """Header, row fields, stop ids, tokens: views of a host buffer, slices on a device."""
        header, fields, stop_ids, tokens = _split(buffer, self._shapes)
        return header, fields, stop_ids, tokens

    def row_views(self, buffer: Buffer) -> tuple[Buffer, Buffer, Buffer]:
        """Header, row fields and stop ids of the first part of a buffer."""
        header, fields, stop_ids = _split(buffer, self._shapes[:3])
        return header, fields, stop_ids

    def unpack_rows(self, packed: Array) -> Unpacked:
        """The first part of the buffer, alone or with the rest behind it, inside the program."""
        header, fields, stop_ids = self.row_views(packed)
        params = fields[:, PARAMS:]

        def floats(column: int) -> Array:
            return lax.bitcast_convert_type(params[:, column], jnp.float32)

        sampling = SamplingRows(
            slots=fields[:, SLOT],
            feature_slots=params[:, 11],
            positions=fields[:, START] + fields[:, NUM_TOKENS],
            stop_ids=stop_ids,
            banned=fields[:, BANS] > 0,
            features=params[:, 0],
            num_logprobs=params[:, 1],
            top_k=params[:, 2],
            temperature=floats(3),
            top_p=floats(4),
            min_p=floats(5),
            presence_penalty=floats(6),
            frequency_penalty=floats(7),
            repetition_penalty=floats(8),
            seed=lax.bitcast_convert_type(params[:, 9:11], jnp.uint32),
        )
        return Unpacked(
            flags=header[FLAGS],
            num_steps=header[NUM_STEPS],
            starts=fields[:, START],
            q_lens=fields[:, NUM_TOKENS],
            max_samples=fields[:, MAX_SAMPLES],
            bans=fields[:, BANS],
            page_indices=fields[:, PAGE_INDEX],
            pages=fields[:, PAGE],
            sampling=sampling,
        )

    def unpack_tokens(self, packed: Array) -> Array:
        """The rest of the buffer: int32[T]."""
        return self.views(packed)[3]


def _split(buffer: Buffer, shapes: tuple[tuple[int, ...], ...]) -> list[Buffer]:
    parts, at = [], 0
    for shape in shapes:
        size = math.prod(shape)
        parts.append(buffer[at : at + size].reshape(shape))
        at += size
    return parts
