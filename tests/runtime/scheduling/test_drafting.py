"""For how many tokens a draft model is asked."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.drafting import Drafting
from penstock.runtime.scheduling.plan import drafted_tokens
from penstock.runtime.scheduling.proposals import Candidate
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence
from tests.support.mix import Turns

STEP_NS = 1e6


def sequence(name: str = "a", *, constrained: bool = False) -> Sequence:
    config = SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=8,
        max_model_len=1000,
        page_size=4,
        num_pages=300,
        eos_token_ids=frozenset(),
        max_queued_requests=1,
    )
    request = Request(
        name,
        (1, 2, 3),
        ResolvedSampling(),
        StoppingParams(max_tokens=900),
        constraint=Turns(5) if constrained else None,
    )
    return Scheduler(config).prepare(request, 0, ())


class Asked:
    """A draft for one sequence. A step takes STEP_NS, and `each` of it more for each guess."""

    def __init__(self, each: float) -> None:
        self.drafting, self.seq, self._each = Drafting("draft"), sequence(), each
        self.drafting.measured(1, 0, STEP_NS)

    @property
    def num(self) -> int:
        """For how many tokens it is asked."""
        (guesses,) = self.drafting.propose([Candidate(self.seq, 4)], 1, 8)
        assert tuple(guesses) == drafted_tokens(len(guesses))
        return len(guesses)

    def step(self, num: int, right: int) -> None:
        """Take a step in which so many tokens were guessed, and so many of them rightly."""
        if num:
            self.seq.proposed_tokens += num
            self.seq.accepted_tokens += right
        self.seq.token_ids += [1] * (right + 1)
        self.drafting.measured(1, num, STEP_NS * (1 + self._each * num))


def test_nothing_is_asked_before_a_step_without_guesses_was_measured() -> None:
    drafting, seq = Drafting("draft"), sequence()
    assert drafting.propose([Candidate(seq, 4)], 1, 8) == [()]
    assert not drafting.is_due([Candidate(seq, 4)], 1, 8)
    drafting.measured(1, 0, STEP_NS)
    assert len(drafting.propose([Candidate(seq, 4)], 1, 8)[0]) > 0
    assert drafting.is_due([Candidate(seq, 4)], 1, 8)


@pytest.mark.parametrize(
    ("each", "share", "least", "most"),
    [
        (0.05, 1.0, 4, 4),
        (0.05, 0.0, 0, 0),
        (1.2, 1.0, 0, 0),  # a guess takes longer than a step
        (0.5, 0.5, 0, 1),
        (0.2, 0.75, 1, 4),
    ],
)
def test_as_many_as_bring_most_in_the_time(each: float, share: float, least: int, most: int) -> None:
    asked = Asked(each)
    for _ in range(30):
        num = asked.num
        asked.step(num, round(share * num))
    assert least <= asked.num <= most


def test_a_sequence_is_tried_again_after_a_while() -> None:
    asked = Asked(0.05)
    for _ in range(30):
        asked.step(asked.num, 0)
    assert asked.num == 0
    for _ in range(70):
        asked.step(0, 0)
    assert asked.num > 0


def test_a_sequence_whose_guesses_are_never_right_is_tried_ever_more_rarely() -> None:
    """After 64 tokens, then 128 and so on, until the last steps with guesses cost less than a hundredth of
    the time. After a right guess it is 64 again.
    """
    asked, tried = Asked(0.2), list[int]()
    for i in range(1500):
        num = asked.num
        if num:
            tried.append(i)
        asked.step(num, 0)
    gaps = [later - earlier for earlier, later in pairwise(tried) if later - earlier > 1]
    assert [gap // 64 for gap in gaps[:3]] == [1, 2, 4]
    assert 0 < sum(i >= 500 for i in tried) < 1000 / 100 / 0.2
    while not asked.num:
        asked.step(0, 0)
    asked.step(1, 1)
    while asked.num:
        asked.step(asked.num, 0)
    for _ in range(70):
        asked.step(0, 0)
    assert asked.num


def test_where_there_was_no_room_nothing_was_wrong() -> None:
    """A sequence that got no guesses for long is tried as soon again as any other."""
    asked = Asked(0.05)
    for _ in range(600):
        assert asked.drafting.propose([Candidate(asked.seq, 4)], 1, 0) == [()]
        asked.step(0, 0)
    while asked.num:
        asked.step(asked.num, 0)
    for _ in range(70):
        asked.step(0, 0)
        assert not asked.drafting.propose([Candidate(asked.seq, 4)], 1, 0)[0]
    assert asked.num


def test_bounds_are_kept() -> None:
    """Room is for all rows or for none, and a row under a constraint gets nothing."""
    drafting = Drafting("draft")
    drafting.measured(3, 0, STEP_NS)
    seqs = [sequence(str(i), constrained=i == 1) for i in range(3)]
    candidates = [Candidate(seq, most) for seq, most in zip(seqs, (4, 4, 1), strict=True)]
    assert [len(guesses) for guesses in drafting.propose(candidates, 3, 8)] == [4, 0, 1]
    assert sum(len(guesses) for guesses in drafting.propose(candidates, 3, 3)) <= 3
    assert [len(guesses) for guesses in drafting.propose(candidates, 3, 1)] == [0, 0, 0]
    for seq in seqs:
        drafting.ended(seq)


@pytest.mark.parametrize(("computes_again", "num"), [(False, 3), (True, 1)])
def test_a_wrong_guess_costs_a_step_more_where_it_is_computed_again(computes_again: bool, num: int) -> None:
    """A guess is right in 7 of 10 cases and takes 0.2 steps. Then 1 to 4 guesses bring 1.42, 1.56, 1.58 and
    1.54 tokens in the time of a step. If the step behind a wrong one brings one token only, in as long a
    time, they bring 1.28, 1.277, 1.20 and 1.13.
    """
    drafting, seq = Drafting("heads", computes_again=computes_again), sequence()
    for _ in range(200):
        for guesses in range(5):
            drafting.measured(1, guesses, STEP_NS * (1 + 0.2 * guesses))
    assert len(drafting.propose([Candidate(seq, 4)], 1, 8)[0]) == num
