"""The shapes and limits of one runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.buckets import Buckets, ProgramKey
from penstock.runtime.execution.program_store import Ahead
from penstock.runtime.execution.step_buffer import Layout
from penstock.runtime.images.vision import Vision
from penstock.runtime.machine.processors import available_processors
from penstock.runtime.requests.request import MAX_STOP_TOKEN_IDS


def check_end_tokens(eos_token_ids: Sequence[int]) -> None:
    """Raise ConfigError if a model has more end tokens than a slot has places for."""
    if len(eos_token_ids) >= MAX_STOP_TOKEN_IDS:
        raise ConfigError(f"eos_token_ids: at most {MAX_STOP_TOKEN_IDS - 1}, not {len(eos_token_ids)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """The shapes and limits of one runner; every value is resolved."""

    buckets: Buckets
    """Which programs exist."""
    max_num_seqs: int
    """Number of slots."""
    max_model_len: int
    """Most tokens of one request, prompt and generated together."""
    page_size: int
    """Tokens per page."""
    dtype: np.dtype[Any]
    """The model's dtype."""
    kv_dtype: np.dtype[Any]
    """The dtype in which keys and values are stored, see `cache_dtype` and `Backend.kv_storage_dtype`."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    feature_slots: int | None = None
    """Most requests with penalties or a bias that run at a time, see `RowState`; None: max_num_seqs, as for
    the scheduler."""
    num_classes: int = 0
    """How many numbers the model's classifier makes; 0: it has none."""
    has_projections: bool = False
    """Whether embeddings pass layers behind their pooling, see `Encoder.projected`."""
    max_logprobs: int = 20
    """Most likeliest tokens per position whose log-probabilities are computed."""
    threads: int = field(default_factory=available_processors)
    """Threads that compile programs; some of them fill masks later."""
    num_snapshots: int = 0
    """Snapshots of state, see `SlotState`; 0 for a model without state by slot."""
    max_decode_steps: int = 1
    """Most steps of a decode program's loop; see `Plan.num_steps`."""
    show_progress: bool = True
    program_folder: Path | None = None
    """Where compiled programs and sets of them are kept (`program_store`); None: nowhere."""
    ahead: Ahead | None = None
    """What reads them before it is known which they are; None: nobody does."""
    compiled: Path | None = None
    """The folder of programs that another machine compiled (`compiled_set`); None: there is none."""
    max_adapters: int = 0
    """Slots of adapters; 0: no step has any."""
    adapter_rank: int = 0
    """The rank for which each slot has room."""
    adapter_size: int = 0
    """How many units of so many values an adapter takes, see `AdapterPlace`."""
    vision: Vision | None = None
    """What the model makes of images; None: it reads none."""
    pool_rows: int = 0
    """Rows of the pool of image embeddings, see `media.encoding`."""
    encode_buckets: tuple[int, ...] = ()
    """Numbers of patches for which there are programs that encode images, in ascending order."""
    checks_proposals: bool = False
    """Whether plans may have proposed tokens, for which there are programs of their own."""
    drafted_tokens: int = 0
    """Most tokens that a draft model guesses for a row in a step; 0: there is no draft."""
    text_guesses: int = 0
    """Most tokens that a window guesses for a row in each of its steps, by a text; 0: no window reads one."""
    text_rows: int = 0
    """Rows of each step of such windows, with those of the guesses."""

    def __post_init__(self) -> None:
        check_end_tokens(self.eos_token_ids)

    def layout(self, key: ProgramKey, num_groups: int) -> Layout:
        """Return the layout of the buffer of a program, with page tables for so many groups of layers."""
        return Layout(
            key,
            num_groups,
            has_snapshots=self.num_snapshots > 0,
            has_images=self.vision is not None,
            sees_ahead=self.vision is not None and self.vision.both_ways,
            has_adapters=self.max_adapters > 0,
        )

    @property
    def adapter_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of the pool of adapters on a device, whose first slot stays zeros; () where there
        are none.
        """
        if not self.max_adapters:
            return ()
        shape = (self.max_adapters + 1, self.adapter_size * self.adapter_rank)
        return (jax.ShapeDtypeStruct(shape, self.dtype),)

    @property
    def pages_per_row(self) -> int:
        """Width of the page table, in pages."""
        return -(-self.max_model_len // self.page_size)

    @property
    def num_feature_slots(self) -> int:
        """Number of rows of `RowState.history` and `RowState.bias`."""
        return self.max_num_seqs if self.feature_slots is None else self.feature_slots

    @property
    def num_top(self) -> int:
        """How many likeliest tokens per position the programs report."""
        return min(self.max_logprobs, self.vocab_size)
