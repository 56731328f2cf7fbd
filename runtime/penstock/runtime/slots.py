"""The host's mirror of the slots: which request holds each, its parameters and its page table; and the
packing of plans from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.buckets import ProgramKey
from penstock.runtime.constraint import TokenConstraint
from penstock.runtime.packing import (
    BANS,
    FEATURES,
    FEEDBACK,
    FLAGS,
    MAX_SAMPLES,
    NUM_STEPS,
    NUM_TOKENS,
    PARAM_FIELDS,
    SLOT,
    START,
    Layout,
    pack_params,
)
from penstock.runtime.plan import PageWrite, Plan, PlanRow
from penstock.runtime.request import MAX_STOP_TOKEN_IDS, Request
from penstock.runtime.runner_config import RunnerConfig
from penstock.runtime.sampling_codes import BANNED, MASK


@dataclass(frozen=True, slots=True)
class _Slot:
    request: Request
    stop_ids: NDArray[np.int32]


class Slots:
    """Filled by what plans say; plain numpy."""

    def __init__(self, config: RunnerConfig) -> None:
        self._config = config
        count = config.max_num_seqs
        self._slots: list[_Slot | None] = [None] * count
        self._params = np.zeros((count, PARAM_FIELDS), np.int32)
        self._tables = np.zeros((count, config.pages_per_row), np.int32)

    def clear(self) -> None:
        """Nobody holds a slot."""
        self._slots = [None] * self._config.max_num_seqs
        self._tables[:] = 0

    def admit(self, slot: int, request: Request) -> None:
        """A request takes a slot."""
        self._params[slot] = pack_params(request)
        stop_ids = np.full(MAX_STOP_TOKEN_IDS, self._config.vocab_size, np.int32)
        ids = list(request.stopping.stop_token_ids)
        if not request.stopping.ignore_eos:
            ids += self._config.eos_token_ids
        stop_ids[: len(ids)] = ids
        self._slots[slot] = _Slot(request, stop_ids)

    def write_page(self, write: PageWrite) -> None:
        """Entries of one page table."""
        end = write.first_index + len(write.pages)
        self._tables[write.slot, write.first_index : end] = write.pages

    def request(self, row: PlanRow) -> Request:
        """Who holds the row's slot."""
        return self._held(row).request

    def constraints(self, plan: Plan) -> dict[int, TokenConstraint]:
        """By row, of those that make a token."""
        return {
            i: constraint
            for i, row in enumerate(plan.rows)
            if row.samples and (constraint := self._held(row).request.constraint) is not None
        }

    def layout(self, key: ProgramKey) -> Layout:
        """Of a program's packed buffer."""
        return Layout(key, self._config.pages_per_row)

    def blank(self, key: ProgramKey) -> NDArray[np.int32]:
        """A buffer of padding only: it computes, writes nowhere and samples nothing."""
        layout = self.layout(key)
        buffer = np.zeros(layout.size, np.int32)
        header, fields, stop_ids, _, _ = layout.views(buffer)
        header[NUM_STEPS] = 1
        fields[:, SLOT] = self._config.max_num_seqs
        stop_ids[:] = self._config.vocab_size
        return buffer

    def pack(
        self, plan: Plan, key: ProgramKey, constraints: Mapping[int, TokenConstraint]
    ) -> NDArray[np.int32]:
        """A fresh buffer: on CPU the runtime may read it in place after the call that it was given to has
        returned.
        """
        buffer = self.blank(key)
        header, fields, stop_ids, tokens, tables = self.layout(key).views(buffer)
        header[NUM_STEPS] = plan.num_steps
        rows, count = plan.rows, len(plan.rows)
        slots = [row.slot for row in rows]
        fields[:count, SLOT] = slots
        fields[:count, START] = [row.start for row in rows]
        fields[:count, NUM_TOKENS] = [row.num_tokens for row in rows]
        fields[:count, MAX_SAMPLES] = [row.max_samples if row.samples else 0 for row in rows]
        bans = [row.bans for row in rows]
        fields[:count, BANS] = bans
        fields[:count, -PARAM_FIELDS:] = self._params[slots]
        tables[:count] = self._tables[slots]
        at = 0
        for i, row in enumerate(rows):
            tokens[at : at + row.num_tokens] = FEEDBACK if row.token_ids is None else row.token_ids
            at += row.num_tokens
            stop_ids[i] = self._held(row).stop_ids
            if not row.samples:
                fields[i, FEATURES] = 0
        fields[list(constraints), FEATURES] |= MASK
        header[FLAGS] = np.bitwise_or.reduce(fields[:count, FEATURES]) | (BANNED if any(bans) else 0)
        return buffer

    def _held(self, row: PlanRow) -> _Slot:
        held = self._slots[row.slot]
        assert held is not None, f"slot {row.slot} runs {row.request_id} but was never admitted"
        return held
