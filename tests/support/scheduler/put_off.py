"""Rows whose masks are not ready in time, so that their tokens are put off."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from penstock.runtime.grammar.masks.mask_thread import RowsAhead
from penstock.runtime.grammar.masks.step_masks import Filled, StepMasks
from penstock.runtime.requests.constraint import Mask


class Anything:
    """A constraint that allows every token."""

    is_complete = False

    def fill(self, mask: Mask) -> None:
        mask[:] = -1

    def accept(self, token_ids: Sequence[int]) -> None: ...


class HalfPutOff:
    """About half of the masks are not ready in time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_skipped = 0
        """How many were not."""
        rng = random.Random(5)

        def fill(
            _: StepMasks, constraints: Mapping[int, Any], masks: Mask, *, others: bool, ahead: RowsAhead
        ) -> Filled:
            skipped = frozenset(row for row in constraints if rng.random() < 0.5)
            self.num_skipped += len(skipped)
            return Filled(masks, {}, skipped, frozenset())

        monkeypatch.setattr(StepMasks, "fill", fill)
