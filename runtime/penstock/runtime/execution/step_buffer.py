"""The one int32 buffer that goes to the device in each step: its layout, how numpy fills it, and how the
program takes it apart.

There is one buffer because each transfer has the same price: eight small ones would cost eight times as much.
Floats travel as their bits. The sections, in order: header, row fields [R, NUM_FIELDS or more], ids that end
the row [R, MAX_STOP_TOKEN_IDS], input tokens [T], and what is said of images. Sampling needs only the first
three, so one sampling program per row bucket serves steps of any number of tokens. Page tables stay on the
device: a row's fields hold at most one new entry, with a page for each group of layers, which is all that a
decode ever adds. When a sequence enters, its whole tables are sent before the step
(`request_programs.make_table_rows`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
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
from penstock.runtime.requests.request import MAX_PROPOSED_TOKENS, MAX_STOP_TOKEN_IDS, Request
from penstock.runtime.requests.sampling import FLOATS, INTS

HEADER = 2
FLAGS, NUM_STEPS = range(HEADER)
PARAMS = 7
SLOT, START, NUM_TOKENS, MAX_SAMPLES, BANS, PAGE_INDEX, PAGE = range(PARAMS)
"""The fields of a row that each step sets. Behind them, from PARAMS on, stand those of the request, and from
NUM_FIELDS on the PAGE of each group of layers after the first. Where there are snapshots of state, the fields
of `SnapshotRows` follow, and where there are adapters, the slot of the row's."""
_WIDTHS = {
    "features": 1,
    "num_logprobs": 1,
    "most_guesses": 1,
    "feature_slots": 1,
    "seed": 2,
    "ints": len(INTS),
    "floats": len(FLOATS),
}
"""The fields of the request, which stay the same while it holds its slot, as `SamplingRows` names them, and
how many columns each has."""
_ENDS = list(itertools.accumulate(_WIDTHS.values()))
PARAM_COLUMNS = {name: slice(end - _WIDTHS[name], end) for name, end in zip(_WIDTHS, _ENDS, strict=True)}
"""Field to columns, counted from PARAMS."""
PARAM_FIELDS = _ENDS[-1]
NUM_FIELDS = PARAMS + PARAM_FIELDS
FEATURES = PARAMS + PARAM_COLUMNS["features"].start
"""Column of the bits that say which features a row uses; the header's flags are the bits of all rows."""
FEEDBACK = -1
"""An input token that stands for the last token that the row's slot sampled."""
_LEAST, _MOST = 1e-30, 1e30
"""The size of every number that is not 0 lies between them. A smaller one may become 0, which for some means
that they are off, or denormal, which the device takes for 0. A logit times a larger one may leave the range
of float32."""

Ints = NDArray[np.int32]
Buffer = TypeVar("Buffer", Ints, Array)


def row_features(request: Request) -> int:
    """Return the bits of what the sampler must look at for this request."""
    sampling = request.sampling
    return (
        PENALTIES * sampling.has_penalties
        | BIAS * sampling.has_bias
        | SAMPLING * (not sampling.greedy)
        | LOGPROBS * (request.logprobs is not None)
    )


def pack_params(request: Request, feature_slot: int = 0) -> Ints:
    """Pack the fields of a row that are constant for a request, int32[PARAM_FIELDS]. If the caller set no
    seed, the engine has drawn one. Without penalties and bias the feature slot is not looked at.
    """
    sampling = request.sampling
    seed = sampling.seed or 0
    row = np.zeros(PARAM_FIELDS, np.int32)

    def put(name: str, values: Sequence[float], dtype: type[np.generic] = np.int32) -> None:
        row[PARAM_COLUMNS[name]] = np.array(values, dtype).view(np.int32)

    put("features", [row_features(request)])
    put("num_logprobs", [-1 if request.logprobs is None else request.logprobs])
    put("most_guesses", [_most_guesses(request)])
    put("feature_slots", [feature_slot])
    put("seed", [seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    put("ints", [getattr(sampling, name) for name in INTS])
    put("floats", [_bounded(getattr(sampling, name)) for name in FLOATS], np.float32)
    return row


def _most_guesses(request: Request) -> int:
    """Return how many tokens a window may guess for a row in each of its steps. Penalties count each token
    before the next one is drawn, so rows with penalties have no guesses.
    """
    asked = request.max_proposed_tokens
    return 0 if request.sampling.has_penalties else MAX_PROPOSED_TOKENS if asked is None else asked


def _bounded(value: float) -> float:
    return math.copysign(min(max(abs(value), _LEAST), _MOST), value) if value else 0.0


class Unpacked(NamedTuple):
    """A step's inputs on the device, except tokens and page tables; R rows."""

    flags: Array  # int32[] bits of the features that any row uses
    num_steps: Array  # int32[]
    starts: Array  # int32[R]
    q_lens: Array  # int32[R]
    max_samples: Array  # int32[R] most tokens the row makes; 0 for a prefill chunk that is not the last
    bans: Array  # int32[R] how many of these must be neither EOS nor stop ids
    most_guesses: Array  # int32[R] how many tokens a text window may guess for the row in each of its steps
    page_indices: Array  # int32[R] index of the new entry of the row's page tables; P or above: none
    pages: tuple[Array, ...]  # for each group of layers int32[R], the page that the entry becomes
    sampling: SamplingRows
    snapshots: SnapshotRows | None  # None where there are no snapshots of state
    adapter_slots: Array | None  # int32[R] 0 for rows without an adapter; None where there are no adapters


@dataclass(frozen=True, slots=True)
class Layout:
    """The offsets of the sections in one program's buffer."""

    key: ProgramKey
    num_groups: int = 1
    """Groups of layers, each of which has page tables of its own."""
    has_snapshots: bool = False
    """Whether there are snapshots of state, so that rows have the fields of `SnapshotRows`."""
    has_images: bool = False
    """Whether the model reads images, so that there is a section of them, see `execution/images.py`."""
    sees_ahead: bool = False
    """Whether tokens of an image see those behind them, so that the section says how far."""
    has_adapters: bool = False
    """Whether there are adapters, so that rows have a field with the slot of theirs."""

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
    def adapter_field(self) -> slice:
        """The column of the slot of the row's adapter; none where there are no adapters."""
        first = self.snapshot_fields.stop
        return slice(first, first + self.has_adapters)

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of header, row fields, stop ids, tokens and the section of images: the only place that
        defines the order of sections.
        """
        rows, tokens = self.key.rows, self.key.tokens
        fields = (rows, self.adapter_field.stop)
        of_tokens = (5 if self.sees_ahead else 4, tokens)
        images = ((rows,) if self.key.window else of_tokens) if self.has_images else (0,)
        return (HEADER,), fields, (rows, MAX_STOP_TOKEN_IDS), (tokens,), images

    @property
    def size(self) -> int:
        """Length of the buffer in int32 words."""
        return sum(map(math.prod, self._shapes))

    @property
    def rows_size(self) -> int:
        """Length of the buffer up to the tokens, in int32 words."""
        return sum(map(math.prod, self._shapes[:3]))

    def views(self, buffer: Buffer) -> tuple[Buffer, Buffer, Buffer, Buffer]:
        """Return header, row fields, stop ids and tokens: views of a host buffer, slices of an array on a
        device.
        """
        header, fields, stop_ids, tokens = _split(buffer, self._shapes[:4])
        return header, fields, stop_ids, tokens

    def images_view(self, buffer: Buffer) -> Buffer:
        """Return the section of images: int32[R] of a window, int32[4 or 5, T] of another step."""
        return _split(buffer, self._shapes)[4]

    def row_views(self, buffer: Buffer) -> tuple[Buffer, Buffer, Buffer]:
        """Return header, row fields and stop ids, of a whole buffer or of one without tokens."""
        header, fields, stop_ids = _split(buffer, self._shapes[:3])
        return header, fields, stop_ids

    def unpack_rows(self, packed: Array) -> Unpacked:
        """Unpack everything but the tokens, inside the program; `packed` may have the tokens or not."""
        header, fields, stop_ids = self.row_views(packed)
        params = fields[:, PARAMS:]

        def words(name: str) -> Array:
            return params[:, PARAM_COLUMNS[name]]

        sampling = SamplingRows(
            slots=fields[:, SLOT],
            feature_slots=words("feature_slots")[:, 0],
            positions=fields[:, START] + fields[:, NUM_TOKENS],
            stop_ids=stop_ids,
            banned=fields[:, BANS] > 0,
            features=words("features")[:, 0],
            num_logprobs=words("num_logprobs")[:, 0],
            ints=words("ints"),
            floats=lax.bitcast_convert_type(words("floats"), jnp.float32),
            seed=lax.bitcast_convert_type(words("seed"), jnp.uint32),
        )
        return Unpacked(
            flags=header[FLAGS],
            num_steps=header[NUM_STEPS],
            starts=fields[:, START],
            q_lens=fields[:, NUM_TOKENS],
            max_samples=fields[:, MAX_SAMPLES],
            bans=fields[:, BANS],
            most_guesses=words("most_guesses")[:, 0],
            page_indices=fields[:, PAGE_INDEX],
            pages=(fields[:, PAGE], *fields[:, self.further_pages].T),
            sampling=sampling,
            snapshots=SnapshotRows(*fields[:, self.snapshot_fields].T) if self.has_snapshots else None,
            adapter_slots=fields[:, self.adapter_field][:, 0] if self.has_adapters else None,
        )

    def unpack_tokens(self, packed: Array) -> Array:
        """Unpack the buffer's tokens, int32[T], inside the program."""
        return self.views(packed)[3]


def _split(buffer: Buffer, shapes: tuple[tuple[int, ...], ...]) -> list[Buffer]:
    parts, at = [], 0
    for shape in shapes:
        size = math.prod(shape)
        parts.append(buffer[at : at + size].reshape(shape))
        at += size
    return parts
