"""Prompt lookup: what it finds, what it learns, and how many tokens it proposes."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.requests.adapter import AdapterValues, AdapterWeights
from penstock.runtime.requests.request import CacheParams, Request
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling import lookup
from penstock.runtime.scheduling.lookup import Copy, Earlier, Lookup, Pairs, Text, Tokens, find
from penstock.runtime.scheduling.proposals import Candidate
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence
from penstock.runtime.scheduling.text_windows import TextWindows
from tests.support.scheduler.fake_runner import Rota
from tests.support.scheduler.scheduling import LIMITS

MS = 1e6
words = st.lists(st.integers(0, 3), max_size=40)


def found_by_hand(tokens: list[int]) -> int | None:
    """Behind the last occurrence of the longest end, of 4 tokens at most and 2 at least."""
    for length in (4, 3, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[end - length : end] == tokens[-length:]:
                return end
    return None


@settings(max_examples=200)
@given(tokens=words)
def test_the_longest_end_is_found_where_it_occurred_last(tokens: list[int]) -> None:
    assert find(np.array(tokens, np.int32), tokens[-4:]) == found_by_hand(tokens)


@settings(max_examples=200)
@given(tokens=words, newest=words)
def test_a_text_finds_what_is_found_by_looking_through_it(tokens: list[int], newest: list[int]) -> None:
    """What stands at its end is found, too: behind it stands what is no token."""
    text = Text(np.array(tokens, np.int32))
    assert text.find(newest[-4:]) == find(text.tokens, newest[-4:])


def test_a_pair_that_a_text_is_full_of_is_not_looked_for_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its last places are looked at, of which the one is chosen behind which most words agree."""
    text = Text(np.array([3, 1, 2, 4, 1, 2, 5, 1, 2, 6], np.int32))
    assert text.find([3, 1, 2]) == 3
    monkeypatch.setattr(Text, "_MOST_PLACES", 2)
    assert text.find([3, 1, 2]) == 9
    assert text.find([4, 1, 2]) == 6


@settings(max_examples=100)
@given(prompt=words.filter(bool), parts=st.lists(words, max_size=8))
def test_a_copy_guesses_what_was_said_before(prompt: list[int], parts: list[list[int]]) -> None:
    """However the tokens come. As long as a guess is right, it goes on where it was; else it looks again,
    also if it is told of several tokens at a time.
    """
    tokens, copy, at = list(prompt), Copy(prompt, 0.5), found_by_hand(prompt)
    for part in parts:
        for token in part:
            at = at + 1 if at is not None and tokens[at] == token else None
            tokens.append(token)
        if part and at is None:
            at = found_by_hand(tokens)
        copy.catch_up(tokens)
        assert copy.has_guess is (at is not None)
        guessed = copy.guess(6)
        if at is not None:
            period = tokens[at:]
            assert guessed == (period * 6)[:6]


def test_the_rate_is_that_of_right_guesses() -> None:
    tokens = [1, 2, 3, 4, 1, 2]
    copy = Copy(tokens, 0.5)
    copy.catch_up([*tokens, 3])
    assert copy.rate > 0.5
    higher = copy.rate
    copy.catch_up([*tokens, 3, 9])
    assert copy.rate < higher
    copy.catch_up([*tokens, 3, 9, 8])  # nothing was guessed
    assert copy.rate == pytest.approx(0.85 * higher)


def test_a_long_sequence_is_remembered_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MOST_TOKENS", 8)
    tokens = [100, 101, 102, *range(8)]
    copy = Copy(tokens, 0.5)
    for token in [*range(20, 60), 58, 59, 60, 100, 101]:
        tokens.append(token)
        copy.catch_up(tokens)
        assert len(copy.tokens) <= 3 * 8 + 64
        assert copy.tokens.tolist() == tokens[-len(copy.tokens) :]
    assert not copy.has_guess  # what came behind 100 and 101 is forgotten


def sequence(
    tokens: list[int], name: str = "a", salt: str = "", *, bypass: bool = False, fork_of: str | None = None
) -> Sequence:
    scheduler = Scheduler(SchedulerConfig(**{**LIMITS, "max_model_len": 10_000, "num_pages": 10_000}))
    request = Request(name, tuple(tokens), cache=CacheParams(salt, bypass), fork_of=fork_of)
    return scheduler.prepare(request, 1, ())


def taught(plain: dict[int, float], checked: dict[int, float], *, computes_again: bool = False) -> Lookup:
    """Make a lookup that has measured steps of so many rows, in ms."""
    proposer = Lookup(lambda: 0, computes_again=computes_again)  # its looks take no time
    for rows, ms in plain.items():
        proposer.measured(rows, 0, ms * MS)
    for rows, ms in checked.items():
        for _ in range(3):
            proposer.measured(rows - 1, 1, ms * MS)
    return proposer


def number(proposer: Lookup, seqs: list[Sequence], num_rows: int, most: int = 4, room: int = 16) -> list[int]:
    candidates = [Candidate(seq, most) for seq in seqs]
    return [len(tokens) for tokens in proposer.propose(candidates, num_rows, room)]


LOOP = [5, 6, 7, 8] * 20


def test_nothing_is_proposed_before_a_step_was_measured_nor_where_nothing_occurred_before() -> None:
    assert number(Lookup(), [sequence(LOOP)], 1) == [0]
    assert number(taught({1: 10.0}, {}), [sequence(list(range(50)))], 1) == [0]


def test_what_a_sequence_repeats_is_proposed() -> None:
    seq, proposer = sequence(LOOP), taught({1: 10.0}, dict.fromkeys(range(2, 8), 10.0))
    assert proposer.propose([Candidate(seq, 6)], 1, 16) == [[5, 6, 7, 8, 5, 6]]


@pytest.mark.parametrize(
    ("checked", "right", "expected"),
    [
        pytest.param({}, True, [4], id="what was not measured is tried"),
        pytest.param({2: 10.0, 3: 10.0, 4: 10.0, 5: 40.0}, True, [3], id="up to where steps become long"),
        pytest.param({2: 60.0}, True, [0], id="none where steps with proposals take too long"),
        pytest.param({2: 10.0, 3: 10.0, 4: 10.0, 5: 10.0}, False, [4], id="free tokens are proposed anyway"),
        pytest.param({2: 11.5}, False, [0], id="none where guesses are wrong"),
    ],
)
def test_as_many_are_proposed_as_pay(checked: dict[int, float], right: bool, expected: list[int]) -> None:
    """A sequence whose guesses were right for long, or wrong nine times in ten."""
    proposer, seq = taught({1: 10.0}, checked), sequence(LOOP)
    rng = random.Random(1)
    number(proposer, [seq], 1)
    for i in range(200):
        seq.token_ids.append([5, 6, 7, 8][i % 4] if right or i % 20 > 6 else rng.randrange(4))
        number(proposer, [seq], 1)
    if not right:
        proposer._copies[seq].rate = 0.1
    assert number(proposer, [seq], 1) == expected


def test_tokens_go_to_the_rows_whose_guesses_are_right() -> None:
    proposer, seqs = taught({2: 10.0}, {}), [sequence(LOOP, "a"), sequence(LOOP, "b")]
    number(proposer, seqs, 2)
    proposer._copies[seqs[0]].rate, proposer._copies[seqs[1]].rate = 0.1, 0.95
    assert number(proposer, seqs, 2) == [0, 4]
    assert number(proposer, seqs, 2, room=3) == [0, 3]


def test_a_step_that_computes_again_is_paid_too() -> None:
    """At a rate of 0.5, one proposal brings 1.5 tokens and, half of the time, a second step with one more: on
    average 2 tokens in 1.5 steps. That pays if it is 1.03 times the 0.1 a ms that plain steps of 10 ms bring,
    so if a step takes 12.94 ms or less. Without a second step, 14.56 ms would pay.
    """
    for ms, again, count in ((12.9, True, 1), (13.0, True, 0), (14.5, False, 1), (14.6, False, 0)):
        proposer = taught({1: 10.0}, {2: ms}, computes_again=again)
        assert number(proposer, [sequence(LOOP)], 1, most=1) == [count], (ms, again)


def test_it_is_worth_waiting_only_where_much_is_gained() -> None:
    seq = sequence(LOOP)
    assert taught({1: 10.0}, {}).is_due([Candidate(seq, 4)], 1, 16)
    assert not taught({1: 10.0}, {2: 13.9}).is_due([Candidate(seq, 1)], 1, 16)
    assert number(taught({1: 10.0}, {2: 13.9}), [seq], 1, most=1) == [1]


def test_outputs_that_repeat_nothing_lose_a_hundredth_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes 5 ms here, and then nobody looks for 99 times as long, unless tokens were proposed."""
    now_ms, looks = 0, 0

    def look(tokens: Tokens, newest: list[int]) -> int | None:
        nonlocal now_ms, looks
        now_ms, looks = now_ms + 5, looks + 1
        return None

    proposer = Lookup(lambda: int(now_ms * MS))
    proposer.measured(1, 0, 10 * MS)
    monkeypatch.setattr(lookup, "find", look)
    seq = sequence([5, 6, 7] * 10)
    while now_ms < 10_000:
        seq.token_ids.append([5, 6, 7][now_ms % 3])
        if now_ms % 2:
            assert not proposer.is_due([Candidate(seq, 4)], 1, 16)
        else:
            assert list(proposer.propose([Candidate(seq, 4)], 1, 16)) == [()]
        now_ms += 1
    assert looks == 20
    monkeypatch.undo()
    now_ms += 500
    for _ in range(3):
        seq.token_ids += [5, 6, 7]
        assert [len(tokens) for tokens in proposer.propose([Candidate(seq, 4)], 1, 16)] == [4]


@settings(max_examples=50)
@given(parts=st.lists(st.lists(st.integers(0, 200_000), min_size=1, max_size=30), min_size=1))
def test_pairs_that_were_taken_in_are_never_denied(parts: list[list[int]]) -> None:
    pairs = Pairs(np.array(parts[0], np.int32), 40)
    for part in parts[1::2]:
        pairs.add_all(np.array(part, np.int32))
    for part in parts[2::2]:
        for pair in pairwise(part):
            pairs.add(*pair)
    assert all(pairs.may_have(*pair) for part in parts for pair in pairwise(part))
    few = Pairs(np.arange(100, dtype=np.int32), 1000)
    assert sum(few.may_have(token, token) for token in range(2000)) < 200


def test_one_long_step_may_be_an_accident() -> None:
    proposer, seq = taught({1: 10.0}, {}), sequence(LOOP)
    for _ in range(3):
        assert number(proposer, [seq], 1, most=1) == [1]
        proposer.measured(1, 1, 99.0 * MS)
    assert number(proposer, [seq], 1, most=1) == [0]


def test_old_times_are_not_believed() -> None:
    proposer, seq = taught({1: 10.0}, {2: 99.0}), sequence(LOOP)
    assert number(proposer, [seq], 1) == [0]
    for _ in range(300):
        proposer.measured(1, 0, 10.0 * MS)
    assert number(proposer, [seq], 1) == [4]


def test_what_has_ended_is_forgotten_and_others_begin_with_what_it_taught() -> None:
    proposer, seq = taught({1: 10.0}, {2: 11.5, 3: 14.0, 4: 20.0, 5: 20.0}), sequence(LOOP)
    assert number(proposer, [seq], 1) == [1]
    proposer._copies[seq].rate = 0.0
    for _ in range(30):
        number(proposer, [seq], 1)
        proposer._copies[seq].rate = 0.0
        proposer.ended(seq)
    assert not proposer._copies
    assert number(proposer, [seq], 1) == [1]  # it is tried again
    assert proposer._copies[seq].rate < 0.5


def guesses(proposer: Lookup, seq: Sequence, most: int = 6) -> list[int]:
    (guessed,) = proposer.propose([Candidate(seq, most)], 1, 16)
    return list(guessed)


def test_what_others_of_the_same_salt_said_is_proposed() -> None:
    """Up to where the other one ended. A sequence's own words come first; and who shares no prefixes shares
    no words.
    """
    proposer = taught({1: 10.0}, dict.fromkeys(range(2, 8), 10.0))
    for tokens, salt, bypass in (
        ([1, 2, 3, 4, 5, 6, 7, 8], "", False),
        ([1, 2, 9, 9, 9], "salt", False),
        ([1, 2, 4, 4, 4], "", True),
    ):
        ended = sequence(tokens, salt=salt, bypass=bypass)
        guesses(proposer, ended)
        proposer.ended(ended)
    assert guesses(proposer, sequence([40, 1, 2])) == [3, 4, 5, 6, 7, 8]
    assert guesses(proposer, sequence([40, 5, 6])) == [7, 8]
    assert guesses(proposer, sequence([1, 2, 30, 31, 1, 2])) == [30, 31, 1, 2, 30, 31]
    assert guesses(proposer, sequence([40, 1, 2], salt="salt")) == [9, 9, 9]
    assert guesses(proposer, sequence([40, 1, 2], salt="other")) == []
    assert guesses(proposer, sequence([40, 1, 2], bypass=True)) == []


def test_nothing_of_others_is_proposed_where_that_was_not_asked_for() -> None:
    proposer = Lookup(lambda: 0, reads_earlier=False)
    proposer.measured(1, 0, MS)
    ended = sequence([1, 2, 3, 4, 5])
    guesses(proposer, ended)
    proposer.ended(ended)
    assert guesses(proposer, sequence([40, 1, 2])) == []
    assert guesses(proposer, sequence([1, 2, 30, 1, 2]))[:1] == [30]


def test_a_text_is_proposed_where_nothing_else_is_found() -> None:
    """A sequence's own words come first, then those of earlier ones, then the text, which is for all. It ends
    where it ends.
    """
    text = np.array([1, 2, 3, 4, 5, 6], np.int32)
    proposer = Lookup(lambda: 0, text=text)
    proposer.measured(1, 0, MS)
    ended = sequence([40, 2, 3, 7, 8])
    guesses(proposer, ended)
    proposer.ended(ended)
    assert guesses(proposer, sequence([50, 1, 2])) == [3, 4, 5, 6]
    assert guesses(proposer, sequence([50, 1, 2], salt="salt", bypass=True)) == [3, 4, 5, 6]
    assert guesses(proposer, sequence([50, 2, 3])) == [7, 8]
    assert guesses(proposer, sequence([50, 2, 3], bypass=True)) == [4, 5, 6]
    assert guesses(proposer, sequence([1, 2, 9, 1, 2]))[:1] == [9]
    assert guesses(proposer, sequence([50, 5, 6])) == []


def test_a_text_is_proposed_only_for_outputs_for_which_no_window_guesses() -> None:
    """Windows guess for no output under a grammar and none with penalties."""
    windows = TextWindows(16)
    proposer = Lookup(lambda: 0, text=np.array([1, 2, 3, 4], np.int32), text_windows=windows)
    proposer.measured(1, 0, MS)
    requests = [
        Request("plain", (50, 1, 2)),
        Request("grammar", (50, 1, 2), constraint=Rota(9)),
        Request("penalties", (50, 1, 2), ResolvedSampling(presence_penalty=0.5)),
    ]
    for are_used, expected in ((True, [[], [3, 4], [3, 4]]), (False, [[3, 4]] * 3)):
        windows.are_used = are_used
        seqs = [Scheduler(SchedulerConfig(**LIMITS)).prepare(each, 1, ()) for each in requests]
        assert [guesses(proposer, seq) for seq in seqs] == expected


def test_an_output_of_a_prompt_that_another_keeps_leaves_its_own_tokens_alone() -> None:
    """All of them, also those that came since it was last looked at: perhaps none at all."""
    proposer = taught({1: 10.0}, dict.fromkeys(range(2, 8), 10.0))
    for said in ([], [8, 9]):
        fork = sequence([1, 2, 3, 4], "a\x001", fork_of="a")
        guesses(proposer, fork)
        fork.token_ids += said
        proposer.ended(fork)
        assert proposer._earlier is not None
        kept = proposer._earlier.of(sequence([1]).request)
        assert (None if kept is None else kept.tokens.tolist()) == ([*said, -1] if said else None)


def test_what_is_kept_of_a_sequence_has_its_last_tokens() -> None:
    proposer, ended = taught({1: 10.0}, dict.fromkeys(range(2, 8), 10.0)), sequence([1, 2, 3])
    guesses(proposer, ended)
    ended.token_ids += [4, 5]
    proposer.ended(ended)
    assert guesses(proposer, sequence([40, 2, 3])) == [4, 5]


def test_what_an_adapter_has_said_is_not_found_without_it() -> None:
    """A key may be limited to some adapters, and learns nothing of the others."""
    earlier, plain = Earlier(), sequence([1]).request
    one, other = (
        dataclasses.replace(
            plain,
            adapter_weights=AdapterWeights(AdapterValues(1, 1, np.dtype(np.float32)), digest, 1, 1.0, ()),
        )
        for digest in ("1a", "2b")
    )
    earlier.add(one, np.arange(30, dtype=np.int32))
    found = [earlier.of(request) for request in (plain, one, other)]
    assert [said and len(said.tokens) for said in found] == [None, 31, None]


def test_a_sequence_follows_another_to_its_end_and_then_looks_again() -> None:
    proposer = taught({1: 10.0}, dict.fromkeys(range(2, 8), 10.0))
    ended, seq = sequence([1, 2, 3, 4, 20, 21]), sequence([20, 21, 22, 1, 2])
    guesses(proposer, ended)
    proposer.ended(ended)
    for token, expected in ((3, [4, 20, 21]), (4, [20, 21]), (20, [21])):
        seq.token_ids.append(token)
        assert guesses(proposer, seq) == expected
    seq.token_ids.append(21)  # there the other one ended, and the sequence itself went on
    assert guesses(proposer, seq)[:2] == [22, 1]


def test_only_so_much_is_kept_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MOST_TOKENS", 100)
    earlier = Earlier()
    requests = [sequence([1], salt=str(i)).request for i in range(20)]
    for request in requests:
        for i in range(50):
            earlier.add(request, np.arange(30, dtype=np.int32) + i)
    kept = [earlier.of(request) for request in requests]
    assert [said and len(said.tokens) for said in kept] == [None] * 4 + [100] * 16


def test_what_a_grammar_expects_is_proposed_before_anything_else() -> None:
    proposer, seq = taught({1: 10.0}, dict.fromkeys(range(2, 8), 10.0)), sequence([1, 2, 30, 31, 1, 2])
    assert guesses(proposer, seq)[:2] == [30, 31]
    seq.forced = [8, 9, 7]
    assert guesses(proposer, seq) == [8, 9, 7]
    assert guesses(proposer, seq, most=2) == [8, 9]
    before = proposer._copies[seq].rate
    seq.token_ids.append(8)
    seq.forced = [9, 7]
    assert guesses(proposer, seq) == [9, 7]
    assert proposer._copies[seq].rate > before  # it was right
    seq.token_ids += [9, 7, 1, 2]
    seq.forced = []
    assert guesses(proposer, seq)[:2] == [8, 9]  # what came behind 1 and 2 the last time
