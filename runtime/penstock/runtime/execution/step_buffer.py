"""The one int32 buffer that goes to the device in each step: its layout, how numpy fills it, and how the
program takes it apart.

There is one buffer because each transfer has the same price: eight small ones would cost eight times as much.
Floats travel as their bits. The sections, in order: header, row fields [R, NUM_FIELDS or more], ids that end
the row [R, MAX_STOP_TOKEN_IDS], input tokens [T], and what is said of pictures. Sampling needs only the first
three, so one sampling program per row bucket serves steps of any number of tokens. Page tables stay on the
device: a row's fields hold at most one new entry, with a page for each group of layers, which is all that a
decode ever adds. When a sequence enters, its whole tables are sent before the step
(`request_programs.make_table_rows`).
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
from penstock.runtime.ops.sampling_codes import BIAS, LOGPROBS, PENALTIES, SAMPLING
from penstock.runtime.ops.sampling_rows import SamplingRows
from penstock.runtime.ops.state_copies import SnapshotRows
from penstock.runtime.requests.request import MAX_STOP_TOKEN_IDS, Request, ResolvedSampling

HEADER = 2
FLAGS, NUM_STEPS = range(HEADER)
PARAMS = 7
SLOT, START, NUM_TOKENS, MAX_SAMPLES, BANS, PAGE_INDEX, PAGE = range(PARAMS)
"""The fields of a row that each step sets. Behind them, from PARAMS on, stand those of the request, and from
NUM_FIELDS on the PAGE of each group of layers after the first. Where there are snapshots of state, the fields
of `SnapshotRows` come last."""
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
"""The fields of the request, which stay the same while it holds its slot. `SamplingRows` has the same names,
except for the two words of the seed."""
PARAM_COLUMN = {name: i for i, name in enumerate((*PARAM_INTS, *PARAM_FLOATS, *PARAM_WORDS))}
"""Field to column, counted from PARAMS."""
PARAM_FIELDS = len(PARAM_COLUMN)
NUM_FIELDS = PARAMS + PARAM_FIELDS
FEATURES = PARAMS + PARAM_COLUMN["features"]
"""Column of the bits that say which features a row uses; the header's flags are the bits of all rows."""
FEEDBACK = -1
"""An input token that stands for the last token that the row's slot sampled."""
_LEAST = float(np.finfo(np.float32).tiny)
"""The smallest positive number of float32 that is not denormal."""
_MOST_PENALTY = 1e30

Ints = NDArray[np.int32]
Buffer = TypeVar("Buffer", Ints, Array)


def row_features(request: Request) -> int:
    """The bits of what the sampler must look at for this request."""
    sampling = request.sampling
    return (
        PENALTIES * sampling.has_penalties
        | BIAS * sampling.has_bias
        | SAMPLING * (not sampling.greedy)
        | LOGPROBS * (request.logprobs is not None)
    )


def pack_params(request: Request, feature_slot: int = 0) -> Ints:
    """The fields of a row that are constant for a request, int32[PARAM_FIELDS]. If the caller set no seed,
    the engine has drawn one. Without penalties and bias the feature slot is not looked at.
    """
    sampling: ResolvedSampling = request.sampling
    seed = sampling.seed or 0
    ints = {
        "features": row_features(request),
        "num_logprobs": -1 if request.logprobs is None else request.logprobs,
        "top_k": sampling.top_k,
        "feature_slots": feature_slot,
    }
    floats = {name: getattr(sampling, name) for name in PARAM_FLOATS}
    # A small positive value may not become 0, which is greedy for the temperature and off for min_p. It may
    # not become a denormal number either, which the device takes for 0.
    for name in ("temperature", "top_p", "min_p"):
        if floats[name] > 0.0:
            floats[name] = max(floats[name], _LEAST)
    # Neither the penalty nor a logit times the penalty may leave the range of float32.
    floats["repetition_penalty"] = min(max(sampling.repetition_penalty, 1 / _MOST_PENALTY), _MOST_PENALTY)
    words = {"seed_high": seed >> 32, "seed_low": seed & 0xFFFFFFFF}
    row = np.zeros(PARAM_FIELDS, np.int32)
    for part, view in ((ints, row), (floats, row.view(np.float32)), (words, row.view(np.uint32))):
        for name, value in part.items():
            view[PARAM_COLUMN[name]] = value
    return row


class Unpacked(NamedTuple):
    """A step's inputs on the device, except tokens and page tables; R rows."""

    flags: Array  # int32[] bits of the features that any row uses
    num_steps: Array  # int32[]
    starts: Array  # int32[R]
    q_lens: Array  # int32[R]
    max_samples: Array  # int32[R] most tokens the row makes; 0 for a prefill chunk that is not the last
    bans: Array  # int32[R] how many of these must be neither EOS nor stop ids
    page_indices: Array  # int32[R] index of the new entry of the row's page tables; P or above: none
    pages: tuple[Array, ...]  # for each group of layers int32[R], the page that the entry becomes
    sampling: SamplingRows
    snapshots: SnapshotRows | None  # None where there are no snapshots of state


@dataclass(frozen=True, slots=True)
class Layout:
    """The offsets of the sections in one program's buffer."""

    key: ProgramKey
    num_groups: int = 1
    """Groups of layers, each of which has page tables of its own."""
    has_snapshots: bool = False
    """Whether there are snapshots of state, so that rows have the fields of `SnapshotRows`."""
    has_pictures: bool = False
    """Whether the model reads pictures, so that there is a section of them, see `media.sections`."""

    @property
    def further_pages(self) -> slice:
        """The columns of the PAGE of each group after the first."""
        return slice(NUM_FIELDS, NUM_FIELDS + self.num_groups - 1)

    @property
    def snapshot_fields(self) -> slice:
        """The columns of the fields of `SnapshotRows`; none where there are no snapshots."""
        first = self.further_pages.stop
        return slice(first, first + (len(SnapshotRows._fields) if self.has_snapshots else 0))

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of header, row fields, stop ids, tokens and the section of pictures: the only place that
        defines the order of sections.
        """
        rows, tokens = self.key.rows, self.key.tokens
        fields = (rows, self.snapshot_fields.stop)
        pictures = ((rows,) if self.key.window else (4, tokens)) if self.has_pictures else (0,)
        return (HEADER,), fields, (rows, MAX_STOP_TOKEN_IDS), (tokens,), pictures

    @property
    def size(self) -> int:
        """Length of the buffer in int32 words."""
        return sum(map(math.prod, self._shapes))

    @property
    def rows_size(self) -> int:
        """Length of the buffer up to the tokens, in int32 words."""
        return sum(map(math.prod, self._shapes[:3]))

    def views(self, buffer: Buffer) -> tuple[Buffer, Buffer, Buffer, Buffer]:
        """Header, row fields, stop ids and tokens: views of a host buffer, slices of an array on a device."""
        header, fields, stop_ids, tokens = _split(buffer, self._shapes[:4])
        return header, fields, stop_ids, tokens

    def pictures_view(self, buffer: Buffer) -> Buffer:
        """The section of pictures: int32[R] of a window, int32[4, T] of another step."""
        return _split(buffer, self._shapes)[4]

    def row_views(self, buffer: Buffer) -> tuple[Buffer, Buffer, Buffer]:
        """Header, row fields and stop ids, of a whole buffer or of one without tokens."""
        header, fields, stop_ids = _split(buffer, self._shapes[:3])
        return header, fields, stop_ids

    def unpack_rows(self, packed: Array) -> Unpacked:
        """Unpacks everything but the tokens, inside the program; `packed` may have the tokens or not."""
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
            pages=(fields[:, PAGE], *fields[:, self.further_pages].T),
            sampling=sampling,
            snapshots=SnapshotRows(*fields[:, self.snapshot_fields].T) if self.has_snapshots else None,
        )

    def unpack_tokens(self, packed: Array) -> Array:
        """The buffer's tokens, int32[T], inside the program."""
        return self.views(packed)[3]


def _split(buffer: Buffer, shapes: tuple[tuple[int, ...], ...]) -> list[Buffer]:
    parts, at = [], 0
    for shape in shapes:
        size = math.prod(shape)
        parts.append(buffer[at : at + size].reshape(shape))
        at += size
    return parts
