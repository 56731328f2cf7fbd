"""The workloads of bench/: their sizes are the table's, they are equal on every machine, and tokens differ in
each repeat.
"""

from __future__ import annotations

import pytest

from bench.workloads import CONCURRENCY, LARGE, MAIN, TABLE, WARMUP, jobs, select, shrunk, waves

WORDS = 1000


def sizes(name):
    return [(len(job.token_ids), job.max_tokens) for job in jobs(TABLE[name], 0, WORDS)]


@pytest.mark.parametrize(
    ("name", "count", "prompt", "output"),
    [
        ("W1", 1, 128, 128),
        ("W2", 16, 256, 128),
        ("W3", 1, 2048, 1),
        ("W4", 16, 1056, 32),
        ("C8", 8, 128, 64),
        ("L2", 16, 32, 16),
    ],
)
def test_even_sizes(name, count, prompt, output):
    assert sizes(name) == [(prompt, output)] * count


def test_w4_is_twice_the_same_wave_with_a_shared_beginning():
    first, second = waves(TABLE["W4"], 0, WORDS)
    assert first == second
    assert len({job.token_ids[:1024] for job in first}) == 1
    assert len({job.token_ids[1024:] for job in first}) == 16


def test_w5_is_ragged_within_its_bounds():
    found = sizes("W5")
    assert len(found) == 32
    assert all(16 <= prompt <= 512 and 16 <= output <= 128 for prompt, output in found)
    assert len(set(found)) > 25


def test_w6_adds_a_long_prompt_to_running_decodes():
    *early, late = jobs(TABLE["W6"], 0, WORDS)
    assert [(len(job.token_ids), job.max_tokens, job.after_tokens) for job in early] == [(64, 128, 0)] * 4
    assert (len(late.token_ids), late.after_tokens) == (2048, 8)


@pytest.mark.parametrize("name", TABLE)
def test_repeats_have_equal_lengths_and_other_tokens(name):
    workload = TABLE[name]
    one, other = jobs(workload, WARMUP, WORDS), jobs(workload, 0, WORDS)
    assert one == jobs(workload, WARMUP, WORDS)
    assert [(len(j.token_ids), j.max_tokens) for j in one] == [
        (len(j.token_ids), j.max_tokens) for j in other
    ]
    assert all(a.token_ids != b.token_ids for a, b in zip(one, other, strict=True))
    assert all(0 <= token < WORDS for job in (*one, *other) for token in job.token_ids)


def test_tokens_do_not_change_between_versions():
    # floor(1000 * random()) of random.Random("tokens of W1 0"), four times
    assert jobs(TABLE["W1"], 0, WORDS)[0].token_ids[:4] == (554, 981, 423, 882)


def test_select():
    assert [w.name for w in select(["main"])] == list(MAIN)
    assert [w.name for w in select(["W3", "concurrency", "W3"])] == ["W3", *CONCURRENCY]
    assert [w.name for w in select(["large"])] == list(LARGE)
    with pytest.raises(ValueError, match="no workload W9; there are W1"):
        select(["W9"])


def test_shrunk():
    small = jobs(shrunk(TABLE["W4"], 16), 0, WORDS)
    assert [(len(job.token_ids), job.max_tokens) for job in small] == [(64 + 2, 2)] * 16
    assert jobs(shrunk(TABLE["W3"], 1000), 0, WORDS)[0].max_tokens == 1
