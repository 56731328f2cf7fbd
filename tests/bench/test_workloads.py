"""The workloads of bench/: their sizes are the table's, they are equal on every machine, and tokens differ in
each repeat.
"""

from __future__ import annotations

import zlib

import pytest
from tokenizers import Tokenizer

from bench.workloads import CONCURRENCY, LARGE, MAIN, SPECULATION, TABLE, WARMUP, jobs, select, shrunk, waves
from penstock.runtime.loading.hub import DEMO_DIRECTORY

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
        ("S1", 1, 1000, 256),
        ("S1x4", 4, 1000, 256),
        ("S2", 1, 12, 256),
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


def test_a_word_of_a_text_is_one_token_wherever_it_stands():
    """The license says "the" about as often as a part of 1,000 of its words."""
    the = zlib.crc32(b" the") % 151_643
    for repeat in range(3):
        tokens = jobs(TABLE["S1"], repeat, 151_643)[0].token_ids
        assert 20 < tokens.count(the) < 100
    stories = Tokenizer.from_file(str(DEMO_DIRECTORY / "tokenizer.json"))
    beginnings = {stories.decode(jobs(TABLE["S2"], repeat, 2048)[0].token_ids) for repeat in range(8)}
    assert "Once upon a time, there was a little girl named " in beginnings
    assert len(beginnings) == 4


def test_select():
    assert [w.name for w in select(["main"])] == list(MAIN)
    assert [w.name for w in select(["W3", "concurrency", "W3"])] == ["W3", *CONCURRENCY]
    assert [w.name for w in select(["large"])] == list(LARGE)
    assert [w.name for w in select(["speculation"])] == list(SPECULATION)
    with pytest.raises(ValueError, match="no workload W9; there are W1"):
        select(["W9"])


def test_shrunk():
    small = jobs(shrunk(TABLE["W4"], 16), 0, WORDS)
    assert [(len(job.token_ids), job.max_tokens) for job in small] == [(64 + 2, 2)] * 16
    assert jobs(shrunk(TABLE["W3"], 1000), 0, WORDS)[0].max_tokens == 1
