"""Rows that keep snapshots of their state, and rows that go on from them, make the tokens that are computed
by hand. Plans are written by hand too, so nothing of the scheduler takes part.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.execution.buckets import Buckets
from penstock.runtime.execution.runner import ModelRunner
from penstock.runtime.ops.cache_spec import CacheSpec
from penstock.runtime.ops.state_copies import SnapshotRows, choose_copies
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.scheduling.plan import PageWrite, Plan, PlanRow, SnapshotUse
from tests.support.collector import GREEDY
from tests.support.models.hybrid import NEWEST, PAGED, STATE, hybrid_model, hybrid_tokens
from tests.support.models.toy import VOCAB, toy_runner

pytestmark = pytest.mark.ci

TOKENS = tuple((11 * i + 3) % VOCAB for i in range(16))


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    with toy_runner(hybrid_model(), Buckets((16,), (4,)), num_snapshots=3) as runner:
        yield runner


class Rows:
    """Runs plans of rows of the requests "r0" to "r3", each in the slot of its number. They share their first
    pages, because they have the same tokens there.
    """

    def __init__(self, runner: ModelRunner, *, shared_pages: int = 16) -> None:
        self._runner = runner
        self._shared_pages = shared_pages
        self._entered: set[int] = set()

    def run(
        self, *rows: tuple[int, int, int], uses: dict[int, SnapshotUse] | None = None, steps: int = 1
    ) -> list[list[int]]:
        """Compute rows of (slot, start, end). Returns the tokens that each makes."""
        new = [slot for slot, _, _ in rows if slot not in self._entered]
        self._entered.update(new)
        made = [
            PlanRow(f"r{slot}", slot, start, end - start, TOKENS[start:end], True, 0, steps)
            for slot, start, end in rows
        ]
        plan = Plan(
            0,
            tuple(made),
            new_requests=tuple((slot, _request(slot)) for slot in new),
            page_writes=tuple(PageWrite(slot, 0, self._pages(slot)) for slot in new),
            num_steps=steps,
            snapshots=uses or {},
        )
        return [list(tokens) for tokens in self._runner.execute(plan).token_ids]

    def _pages(self, slot: int) -> tuple[int, ...]:
        shared = self._shared_pages
        return (*range(shared), *range(16 * slot + shared, 16 * slot + 16))


def _request(slot: int) -> Request:
    return Request(f"r{slot}", TOKENS, GREEDY, StoppingParams(ignore_eos=True))


def after(end: int, num: int = 1) -> list[int]:
    return hybrid_tokens(TOKENS[:end], num)


@pytest.mark.ci
@pytest.mark.parametrize("cut", [1, 2, 7, 8])
def test_a_row_goes_on_from_what_another_row_kept(runner: ModelRunner, cut: int) -> None:
    """The row that keeps its state goes on as if nothing had happened, and the snapshot stays as it is when
    both have gone on.
    """
    rows = Rows(runner)
    assert rows.run((0, 0, 8), uses={0: SnapshotUse(cut=cut, cut_to=1)}) == [after(8)]
    assert rows.run((0, 8, 9)) == [after(9)]
    for slot in (1, 2):
        assert rows.run((slot, cut, cut + 3), uses={0: SnapshotUse(source=1)}) == [after(cut + 3)]
        assert rows.run((slot, cut + 3, cut + 4)) == [after(cut + 4)]
        assert rows.run((slot, cut + 4, cut + 7)) == [after(cut + 7)]
    assert rows.run((0, 9, 12)) == [after(12)]


def test_a_row_of_one_token_keeps_its_state_and_begins_behind_a_snapshot(runner: ModelRunner) -> None:
    """Rows of one token run in the programs for decodes, also in windows of several steps, where only the
    first step may look at snapshots. The pages behind position 8 are not shared: tokens are generated there.
    """
    rows = Rows(runner, shared_pages=2)
    rows.run((0, 0, 7))
    assert rows.run((0, 7, 8), uses={0: SnapshotUse(cut=1, cut_to=0)}) == [after(8)]
    assert rows.run((1, 8, 9), uses={0: SnapshotUse(source=0, cut=1, cut_to=2)}) == [after(9)]
    assert rows.run((1, 9, 10)) == [after(10)]
    window = rows.run((2, 8, 9), (1, 10, 11), uses={0: SnapshotUse(source=0, cut=1, cut_to=1)}, steps=3)
    assert window == [after(9, 3), after(11, 3)]
    assert rows.run((3, 8, 9), uses={0: SnapshotUse(source=0)}) == [after(9)]
    for source in (1, 2):
        assert rows.run((3, 9, 12), uses={0: SnapshotUse(source=source)}) == [after(12)]


def test_a_row_that_is_put_off_begins_behind_its_snapshot_again(runner: ModelRunner) -> None:
    rows = Rows(runner)
    rows.run((0, 0, 8), uses={0: SnapshotUse(cut=4, cut_to=2)})
    for _ in range(3):
        assert rows.run((1, 4, 9), uses={0: SnapshotUse(source=2)}) == [after(9)]
    assert rows.run((1, 9, 10)) == [after(10)]


def test_one_step_reads_and_writes_many_snapshots(runner: ModelRunner) -> None:
    """Packed rows keep apart what they read and write, and a row may read one and write another."""
    rows = Rows(runner)
    rows.run((0, 0, 6), (1, 0, 8), uses={0: SnapshotUse(cut=4, cut_to=0), 1: SnapshotUse(cut=8, cut_to=1)})
    uses = {0: SnapshotUse(source=1), 2: SnapshotUse(source=0, cut=2, cut_to=2)}
    assert rows.run((3, 8, 12), (0, 6, 7), (2, 4, 9), uses=uses) == [after(12), after(7), after(9)]
    assert rows.run((1, 6, 10), uses={0: SnapshotUse(source=2)}) == [after(10)]


def test_entries_are_chosen_by_hand() -> None:
    """Two slots and three snapshots: the copies are entries 0 to 3, the snapshots 4 to 6, and 7 is past the
    end. The rows: one that begins anew, one behind snapshot 1, one that goes on, and padding.
    """
    held = jnp.asarray([9, 5], jnp.int32)
    slots = jnp.asarray([0, 1, 1, 2], jnp.int32)
    starts = jnp.asarray([0, 5, 5, 0], jnp.int32)
    lengths = jnp.asarray([4, 3, 1, 0], jnp.int32)
    snapshots = SnapshotRows(
        jnp.asarray([-1, 1, -1, -1]), jnp.asarray([4, 0, 1, 0]), jnp.asarray([2, 0, 0, 0])
    )
    chosen = choose_copies(
        held, slots[:1], starts[:1], lengths[:1], jax.tree.map(lambda x: x[:1], snapshots), 3
    )
    assert [np.asarray(x).tolist() for x in chosen] == [[7], [0], [4, 5], [4], [6]]
    chosen = choose_copies(
        held, slots[1:2], starts[1:2], lengths[1:2], jax.tree.map(lambda x: x[1:2], snapshots), 3
    )
    assert [np.asarray(x).tolist() for x in chosen] == [[5], [1], [9, 8], [0], [7]]
    chosen = choose_copies(
        held, slots[2:], starts[2:], lengths[2:], jax.tree.map(lambda x: x[2:], snapshots), 3
    )
    assert [np.asarray(x).tolist() for x in chosen] == [[1, 7], [3, 7], [9, 5], [1, 0], [4, 7]]
    without = choose_copies(held, slots[2:], starts[2:], lengths[2:])
    assert [None if x is None else np.asarray(x).tolist() for x in without] == [
        [1, 4],
        [3, 4],
        [9, 5],
        None,
        None,
    ]


def test_snapshots_are_further_rows_of_the_same_arrays() -> None:
    cache = CacheSpec((STATE, PAGED, NEWEST))
    assert cache.snapshot_bytes == 4 + 4
    arrays = cache.arrays((7,), 4, 3, np.dtype(np.float32), 5)
    assert [leaf.shape for leaf in jax.tree.leaves(arrays)] == [(11,), (7, 2, 1, 4, 4), (11, 1)]
    assert cache.state_bytes(3, 5) == 3 * 2 * 8 + 5 * 8
    assert CacheSpec((PAGED,)).state_bytes(3, 5) == 0


def test_every_schedule_of_cuts_gives_the_same_tokens(runner: ModelRunner) -> None:
    """Chunks of random lengths, with cuts at random places and new beginnings behind them."""
    rng = np.random.default_rng(7)
    for _ in range(12):
        rows, kept = Rows(runner), dict[int, int]()
        for slot in rng.permutation(4).tolist():
            at, source = 0, -1
            if kept and rng.random() < 0.7:
                source = int(rng.choice(sorted(kept)))
                at = kept[source]
            while at < 12:
                length = int(rng.integers(1, 13 - at))
                cut, cut_to = int(rng.integers(0, length + 1)), int(rng.integers(3))
                if cut_to == source:
                    cut = 0
                assert rows.run(
                    (slot, at, at + length), uses={0: SnapshotUse(source=source, cut=cut, cut_to=cut_to)}
                ) == [after(at + length)]
                if cut:
                    kept[cut_to] = at + cut
                at, source = at + length, -1
