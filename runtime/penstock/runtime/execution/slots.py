"""The host's copy of the slots: which request holds each, its parameters and its page table. It packs plans
into buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.images import POSITIONS, fill_tokens, shift_of
from penstock.runtime.execution.request_programs import TABLE_ROWS, pack_table_rows
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.execution.step_buffer import (
    FEATURES,
    FEEDBACK,
    FLAGS,
    MAX_SAMPLES,
    NUM_FIELDS,
    NUM_STEPS,
    NUM_TOKENS,
    PAGE,
    PAGE_INDEX,
    PARAM_FIELDS,
    PARAMS,
    SLOT,
    START,
    Layout,
    pack_params,
)
from penstock.runtime.ops.sampling_codes import BANNED, MASK
from penstock.runtime.requests.constraint import TokenConstraint
from penstock.runtime.requests.request import MAX_STOP_TOKEN_IDS, Request
from penstock.runtime.scheduling.plan import NO_SNAPSHOT_USE, Plan, PlanRow

_NONE = -1
"""Stands for an index of a page table where there is none."""


class Slots:
    """The slots' contents in plain numpy, filled by what plans say. What a step needs of a slot is computed
    once, when a request takes the slot, so a step costs a few operations over whole columns, however many
    rows it has.
    """

    def __init__(self, config: RunnerConfig, num_groups: int = 1) -> None:
        """`num_groups`: groups of layers, each of which has page tables of its own."""
        self._config = config
        self._num_groups = num_groups
        count = config.max_num_seqs
        self._requests: list[Request | None] = [None] * count
        self._logprobs: list[int | None] = [None] * count
        self._constrained: set[int] = set()
        self.want_hidden: set[int] = set()
        """The slots whose requests want the hidden states from which their tokens are chosen."""
        self._params = np.zeros((count, PARAM_FIELDS), np.int32)
        self._stop_ids = np.full((count, MAX_STOP_TOKEN_IDS), config.vocab_size, np.int32)
        self._adapters = np.zeros(count, np.int32)  # the slots of their adapters
        self._shifts = np.zeros(count, np.int32)  # what is added to positions for the rotary ones
        self._tables = np.zeros((num_groups, count, config.pages_per_row), np.int32)
        self._layouts: dict[ProgramKey, Layout] = {}
        self._blanks: dict[ProgramKey, NDArray[np.int32]] = {}

    def admit(self, slot: int, request: Request, feature_slot: int = 0, adapter_slot: int = 0) -> None:
        """Give a slot to a request and, if it has penalties or a bias, a feature slot. ConfigError if there
        is no such feature slot: what is written there would be lost. `adapter_slot`: that of its adapter; 0:
        it has none.
        """
        if feature_slot >= self._config.num_feature_slots:
            raise ConfigError(
                f"feature slot {feature_slot} of {request.request_id}: the runner has "
                f"{self._config.num_feature_slots}; give runner and scheduler the same feature_slots"
            )
        if request.adapter_weights is not None:  # they are large, and may be wanted by nobody else soon
            request = dataclasses.replace(request, adapter_weights=None)
        self._requests[slot] = request
        self._adapters[slot] = adapter_slot
        wanted = request.logprobs
        self._logprobs[slot] = None if wanted is None else min(wanted, self._config.num_top)
        (self._constrained.discard if request.constraint is None else self._constrained.add)(slot)
        (self.want_hidden.add if request.hidden_states else self.want_hidden.discard)(slot)
        self._params[slot] = pack_params(request, feature_slot)
        self._shifts[slot] = shift_of(request)
        ids = list(request.stopping.stop_token_ids)
        if not request.stopping.ignore_eos:
            ids += self._config.eos_token_ids
        self._stop_ids[slot, : len(ids)] = ids
        self._stop_ids[slot, len(ids) :] = self._config.vocab_size

    def write_pages(self, plan: Plan) -> list[int]:
        """Take a plan's new page-table entries. Returns the slots whose whole tables must be sent before the
        step: a row of the step has room for the entries at one index, and these slots get more.
        """
        opened = {row.slot: _NONE for row in plan.rows}  # the index of the entries that a row has
        whole: list[int] = []
        for write in plan.page_writes:
            slot, first = write.slot, write.first_index
            self._tables[write.group, slot, first : first + len(write.pages)] = write.pages
            if len(write.pages) == 1 and opened.get(slot) in (_NONE, first):
                opened[slot] = first
            elif slot not in whole:
                whole.append(slot)
        return whole

    def table_rows(self, slots: Sequence[int]) -> Iterator[NDArray[np.int32]]:
        """Yield the arguments for the calls of `make_table_rows`'s program that send the whole tables of
        these slots.
        """
        for i in range(0, len(slots), TABLE_ROWS):
            yield pack_table_rows(slots[i : i + TABLE_ROWS], self._tables)

    def request(self, row: PlanRow) -> Request:
        """Return the request that holds the row's slot."""
        request = self._requests[row.slot]
        assert request is not None, f"slot {row.slot} runs {row.request_id} but was never admitted"
        return request

    def constraints(self, plan: Plan) -> dict[int, TokenConstraint]:
        """Map rows to constraints, for the rows of this plan that sample."""
        if not self._constrained:
            return {}
        return {
            i: constraint
            for i, row in enumerate(plan.rows)
            if row.samples and (constraint := self.request(row).constraint) is not None
        }

    def logprobs(self, plan: Plan) -> list[int | None]:
        """Say for each row how many log-probabilities of likeliest tokens to report; None: not even the
        sampled token's.
        """
        logprobs = self._logprobs
        return [logprobs[row.slot] if row.samples else None for row in plan.rows]

    def layout(self, key: ProgramKey) -> Layout:
        """Return the layout of the buffer of a program."""
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._config.layout(key, self._num_groups)
        return layout

    def blank(self, key: ProgramKey) -> NDArray[np.int32]:
        """Make a buffer of padding only: a step with it computes, but writes nowhere and samples nothing."""
        blank = self._blanks.get(key)
        if blank is None:
            layout = self.layout(key)
            blank = self._blanks[key] = np.zeros(layout.size, np.int32)
            header, fields, stop_ids, _ = layout.views(blank)
            header[NUM_STEPS] = 1
            fields[:, SLOT] = self._config.max_num_seqs
            fields[:, PAGE_INDEX] = self._config.pages_per_row
            if layout.has_snapshots:
                fields[:, layout.snapshot_fields] = NO_SNAPSHOT_USE
            stop_ids[:] = self._config.vocab_size
            if layout.has_images and not key.window:
                layout.images_view(blank)[POSITIONS] = self._config.pool_rows
        return blank.copy()

    def silenced(self, packed: NDArray[np.int32], key: ProgramKey, rows: Iterable[int]) -> NDArray[np.int32]:
        """Return a copy of a packed buffer without its tokens, in which these rows make no token and leave
        their slots as they are. It is a copy because the runtime may be reading the original.
        """
        packed = packed.copy()
        _, fields, _ = self.layout(key).row_views(packed)
        fields[list(rows), MAX_SAMPLES] = 0
        fields[list(rows), FEATURES] = 0
        return packed

    def pack(self, plan: Plan, key: ProgramKey, masked: Sequence[int]) -> NDArray[np.int32]:
        """Pack a plan into a new buffer. It is new because, on CPU, the runtime may read a buffer in place
        after the call that took it has returned. `masked`: the rows that get masks.
        """
        buffer = self.blank(key)
        layout = self.layout(key)
        header, fields, stop_ids, tokens = layout.views(buffer)
        header[NUM_STEPS] = plan.num_steps
        count = len(plan.rows)
        _, row_slots, starts, nums, ids, samples, bans, most, _ = zip(*plan.rows, strict=True)
        step = np.array([row_slots, starts, nums, most, bans], np.int32)  # in the order of the fields
        slots = step[SLOT]
        fields[:count, : len(step)] = step.T
        fields[:count, PARAMS:NUM_FIELDS] = self._params[slots]
        stop_ids[:count] = self._stop_ids[slots]
        if layout.has_adapters:
            fields[:count, layout.adapter_field] = self._adapters[slots][:, None]
        if plan.page_writes:
            rows = dict(zip(row_slots, range(count), strict=True))
            for write in plan.page_writes:
                if len(write.pages) == 1 and write.slot in rows:
                    row = rows[write.slot]
                    fields[row, PAGE_INDEX : PAGE + 1] = write.first_index, write.pages[0]
                    if self._num_groups > 1:
                        # The new entries are at the same index in all groups, and a group that gets no page
                        # there sends what it has.
                        pages = self._tables[:, write.slot, write.first_index]
                        fields[row, PAGE], fields[row, layout.further_pages] = pages[0], pages[1:]
        for row, use in plan.snapshots.items():
            fields[row, layout.snapshot_fields] = use
        if any(ids):
            at = 0
            for num, given in zip(nums, ids, strict=True):
                tokens[at : at + num] = FEEDBACK if given is None else given
                at += num
        else:
            tokens[:count] = FEEDBACK
        if layout.has_images:
            section, shifts = layout.images_view(buffer), self._shifts[slots]
            if key.window:
                section[:count] = shifts
            else:
                fill_tokens(section, plan, step[START], step[NUM_TOKENS], shifts, self.request)
        if not all(samples):
            silent = [i for i, row_samples in enumerate(samples) if not row_samples]
            fields[silent, MAX_SAMPLES] = 0
            fields[silent, FEATURES] = 0
        if masked:
            fields[masked, FEATURES] |= MASK
        header[FLAGS] = np.bitwise_or.reduce(fields[:count, FEATURES]) | (BANNED if any(bans) else 0)
        return buffer
