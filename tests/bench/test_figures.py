"""The figures of bench/, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from bench.measures.figures import figures, medians, table, wall_s
from bench.workloads import Job
from penstock.cli.measuring.stats import RequestTrace


def trace(sent, times, *, prompt=10, each=1, error=None):
    """Make a trace that ends with its last arrival."""
    return RequestTrace(sent, tuple((time, each) for time in times), max(times, default=sent), prompt, error)


def job(outputs, after=0, prompt=10):
    return Job((1,) * prompt, outputs, after)


def test_one_request():
    # First token after 0.5 s for 10 prompt tokens; 4 more in 2 s; gaps 0.5, 0.5, 0.25, 0.75.
    found = figures((job(5),), [[trace(100.0, [100.5, 101.0, 101.5, 101.75, 102.5])]])
    assert found["prefill_tokens_per_s"] == 20.0
    assert found["decode_tokens_per_s"] == 2.0
    assert found["output_tokens_per_s"] == 2.0  # 5 tokens in 2.5 s
    assert (found["itl_p50_ms"], found["itl_max_ms"]) == (500.0, 750.0)
    assert (found["ttft_s"], found["decode_s"]) == (0.5, 2.0)


def test_several_tokens_in_a_message():
    # 4 tokens at 1 s, 4 at 2 s, 4 at 3 s: 8 tokens in the 2 s after the first message.
    found = figures((job(12),), [[trace(0.0, [1.0, 2.0, 3.0], each=4)]])
    assert found["decode_tokens_per_s"] == 4.0


def test_waves():
    first = [trace(0.0, [1.0, 2.0]), trace(0.5, [3.0, 4.0])]
    second = [trace(10.0, [10.5, 11.0]), trace(10.0, [10.5, 11.0])]
    found = figures((job(2), job(2)), [first, second])
    assert (found["wave1_s"], found["wave2_s"], found["wall_s"]) == (4.0, 1.0, 5.0)
    assert found["output_tokens_per_s"] == 8 / 5
    assert "prefill_tokens_per_s" not in found


def test_one_token_has_no_pace():
    found = figures((job(1),), [[trace(0.0, [2.0], prompt=4)]])
    assert found["prefill_tokens_per_s"] == 2.0
    assert not {"decode_tokens_per_s", "itl_p50_ms"} & set(found)


def test_only_gaps_beside_the_late_prompt_count():
    # The late prompt is sent at 3.5 and has its token at 6.5: the gaps 3-4, 4-6 and 6-7 overlap that.
    early = trace(0.0, [1.0, 3.0, 4.0, 6.0, 7.0, 10.0])
    found = figures((job(6), job(1, after=2)), [[early, trace(3.5, [6.5])]])
    assert found["itl_max_ms"] == 2000.0
    assert found["itl_p50_ms"] == 1000.0
    assert found["late_ttft_s"] == 3.0


@pytest.mark.parametrize(
    ("bad", "message"),
    [(trace(0.0, [1.0]), "asked for 2 tokens, got 1"), (trace(0.0, [], error="lost"), "failed: lost")],
)
def test_what_did_not_run_is_not_measured(bad, message):
    with pytest.raises(ValueError, match=message):
        figures((job(2),), [[bad]])


def test_wall_is_from_first_send_to_last_end():
    assert wall_s([trace(2.0, [5.0]), trace(1.0, [3.0])]) == 4.0


def test_medians_and_table():
    repeats = [{"output_tokens_per_s": value, "wall_s": 1.0} for value in (30.0, 10.0, 20.0)]
    assert medians(repeats)["output_tokens_per_s"] == (20.0, 10.0, 30.0)
    assert "| W2 | output, tok/s | 20 | 10 | 30 |" in table({"W2": repeats})
