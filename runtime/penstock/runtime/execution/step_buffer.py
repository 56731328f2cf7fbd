"""The one int32 buffer that goes to the device each step: its layout, filled with numpy, taken apart in the
program.

One transfer costs what eight small ones cost each; floats travel as their bits. Sections, in order: header,
row fields [R, NUM_FIELDS], ids that end the row [R, MAX_STOP_TOKEN_IDS], input tokens [T]. The first three
are all that sampling needs, so that one sampling program per row bucket serves steps of any number of
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

from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.ops.sampler import SamplingRows
from penstock.runtime.ops.sampling_codes import BIAS, LOGPROBS, PENALTIES, SAMPLING
from penstock.runtime.requests.request import MAX_STOP_TOKEN_IDS, Request, SamplingParams

HEADER = 2
FLAGS, NUM_STEPS = range(HEADER)
PARAMS = 7
SLOT, START, NUM_TOKENS, MAX_SAMPLES, BANS, PAGE_INDEX, PAGE = range(PARAMS)
"""The fields of a row that each step sets. Behind them, from PARAMS on, stand those of the request."""
PARAM_INTS = ("features", "num_logprobs", "top_k", "feature_slots")
PARAM_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
PARAM_WORDS = ("seed_high", "seed_low")
"""The fields of the request, which are constant while it holds its slot: as `SamplingRows` names them, but
for the two words of its seed."""
PARAM_COLUMN = {name: i for i, name in enumerate((*PARAM_INTS, *PARAM_FLOATS, *PARAM_WORDS))}
"""Where each of them stands behind PARAMS."""
PARAM_FIELDS = len(PARAM_COLUMN)
NUM_FIELDS = PARAMS + PARAM_FIELDS
FEATURES = PARAMS + PARAM_COLUMN["features"]
"""The field of a row that holds its bits of the header's flags."""
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
    sampling: SamplingParams = request.sampling
    seed = sampling.seed or 0
    ints = {
        "features": row_features(request),
        "num_logprobs": -1 if request.logprobs is None else request.logprobs,
        "top_k": sampling.top_k,
        "feature_slots": feature_slot,
    }
    floats = {name: getattr(sampling, name) for name in PARAM_FLOATS}
    # Neither it nor what it makes of a logit may leave the range of float32.
    floats["repetition_penalty"] = min(max(sampling.repetition_penalty, 1 / _MOST_PENALTY), _MOST_PENALTY)
    words = {"seed_high": seed >> 32, "seed_low": seed & 0xFFFFFFFF}
    row = np.zeros(PARAM_FIELDS, np.int32)
    for part, view in ((ints, row), (floats, row.view(np.float32)), (words, row.view(np.uint32))):
        for name, value in part.items():
            view[PARAM_COLUMN[name]] = value
    return row


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
        params = {name: fields[:, PARAMS + column] for name, column in PARAM_COLUMN.items()}
        words = jnp.stack([params[name] for name in PARAM_WORDS], axis=1)
        sampling = SamplingRows(
            slots=fields[:, SLOT],
            positions=fields[:, START] + fields[:, NUM_TOKENS],
            stop_ids=stop_ids,
            banned=fields[:, BANS] > 0,
            seed=lax.bitcast_convert_type(words, jnp.uint32),
            **{name: params[name] for name in PARAM_INTS},
            **{name: lax.bitcast_convert_type(params[name], jnp.float32) for name in PARAM_FLOATS},
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
