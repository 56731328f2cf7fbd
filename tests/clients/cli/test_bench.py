"""`penstock bench`: its arithmetic against numbers worked out by hand, and the command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import grpc
import pytest

from penstock.cli.__main__ import main
from penstock.cli.measuring.load import Workload, prompts
from penstock.cli.measuring.stats import (
    Distribution,
    RequestTrace,
    distribution,
    inter_token_latencies,
    percentile,
    report,
    table,
    time_per_output_token,
    time_to_first_token,
)
from penstock.v1 import inference_pb2

Code = grpc.StatusCode

# Sent at 10; 1 token at 10.5, 1 at 10.75, 2 together at 11.5; the stream ended at 12.
TRACE = RequestTrace(sent=10.0, arrivals=((10.5, 1), (10.75, 1), (11.5, 2)), ended=12.0, prompt_tokens=3)
# Sent at 10.5; 4 tokens in one message at 12.5; ended at 12.5.
AT_ONCE = RequestTrace(sent=10.5, arrivals=((12.5, 4),), ended=12.5, prompt_tokens=5)
FAILED = RequestTrace(sent=11.0, arrivals=(), ended=15.0, prompt_tokens=7, error="QUEUE_FULL: full")


def test_one_request():
    assert time_to_first_token(TRACE) == 0.5
    # 3 tokens came in the 1.0 s after the first message.
    assert time_per_output_token(TRACE) == pytest.approx(1.0 / 3)
    assert inter_token_latencies(TRACE) == [0.25, 0.75]
    assert TRACE.completion_tokens == 4


def test_one_message_has_no_pace():
    assert time_to_first_token(AT_ONCE) == 2.0
    assert time_per_output_token(AT_ONCE) is None
    assert inter_token_latencies(AT_ONCE) == []


def test_no_token_has_no_first():
    assert time_to_first_token(FAILED) is None
    assert time_per_output_token(FAILED) is None


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0], 50, 1.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 90, 4.6),  # rank 3.6
        ([0.0, 10.0], 99, 9.9),
        ([4.0, 8.0], 0, 4.0),
        ([4.0, 8.0], 100, 8.0),
    ],
)
def test_percentile(values, percent, expected):
    assert percentile(values, percent) == pytest.approx(expected)


def test_distribution():
    assert distribution([]) is None
    found = distribution([4.0, 1.0, 2.0, 3.0, 5.0])
    assert found is not None
    assert (found.mean, found.p50) == (3.0, 3.0)
    assert found.p90 == pytest.approx(4.6)
    assert found.p99 == pytest.approx(4.96)


def test_report():
    found = report([TRACE, AT_ONCE, FAILED])
    assert (found.completed, found.failed, found.errors) == (2, 1, {"QUEUE_FULL: full": 1})
    assert found.duration == 5.0  # from 10 to 15
    assert (found.prompt_tokens, found.completion_tokens) == (8, 8)
    assert found.requests_per_second == 0.4
    assert found.output_tokens_per_second == 1.6
    assert found.total_tokens_per_second == 3.2
    assert found.time_to_first_token == distribution([0.5, 2.0])
    assert found.time_per_output_token == distribution([1.0 / 3])
    assert found.inter_token_latency == distribution([0.25, 0.75])
    assert found.end_to_end == Distribution(2.0, 2.0, 2.0, 2.0)


def test_a_report_of_failures_has_no_latencies():
    found = report([FAILED])
    assert found.requests_per_second == 0
    assert found.time_to_first_token is None
    assert "failed 1 times: QUEUE_FULL: full" in table(found)


def test_table_is_in_milliseconds():
    lines = table(report([TRACE, AT_ONCE])).splitlines()
    first = next(line for line in lines if line.startswith("time to first token"))
    # Of 0.5 s and 2 s: mean and p50 1.25 s, p90 0.5 + 0.9 * 1.5 = 1.85 s, p99 1.985 s.
    assert first.split()[4:] == ["1250.00", "1250.00", "1850.00", "1985.00"]


def workload(**changes):
    values = {
        "cache_salt": "s",
        "requests": 3,
        "prompt_tokens": 50,
        "max_tokens": 2,
        "seed": 0,
        "concurrency": 1,
        "request_rate": None,
        "temperature": None,
        "vocab_size": 5,
        "excluded_token_ids": (2,),
    }
    return Workload(**{**values, **changes})


def test_prompts_are_random_but_repeatable():
    first = prompts(workload(), 3, seed=1)
    assert [len(p) for p in first] == [50, 50, 50]
    assert {token for p in first for token in p} == {0, 1, 3, 4}  # never 2
    assert len({tuple(p) for p in first}) == 3
    assert first == prompts(workload(), 3, seed=1)
    assert first != prompts(workload(), 3, seed=2)


def run(*argv):
    return main([str(argument) for argument in argv])


@pytest.mark.parametrize("more", [["--concurrency", "2"], ["--request-rate", "1000"]])
def test_bench(server, capsys, tmp_path, more):
    file = tmp_path / "report.json"
    code = run(
        "bench", "--addr", server.addr, "--requests", 5, "--prompt-tokens", 6, "--max-tokens", 4, "--seed", 3,
        "--output", file, "--json", *more,
    )  # fmt: skip
    assert code == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(file.read_text())
    assert shown["settings"]["requests"] == 5
    measured = shown["report"]
    assert (measured["completed"], measured["failed"]) == (5, 0)
    assert (measured["prompt_tokens"], measured["completion_tokens"]) == (30, 20)
    assert measured["time_to_first_token"]["p50"] > 0
    streams = [call for call in server.calls if isinstance(call, inference_pb2.StreamRequest)]
    warmups = [call for call in server.calls if isinstance(call, inference_pb2.GenerateRequest)]
    assert (len(streams), len(warmups)) == (5, 1)
    assert sorted(call.sampling.seed for call in streams) == [3, 4, 5, 6, 7]
    for call in streams:
        assert len(call.prompt_token_ids.ids) == 6
        assert not {2, 3} & set(call.prompt_token_ids.ids)  # the end tokens
        assert (call.stopping.max_tokens, call.stopping.ignore_eos) == (4, True)


def test_a_second_run_does_not_find_the_prompts_of_the_first_in_the_prefix_cache(server):
    few = ("--requests", 2, "--prompt-tokens", 3, "--max-tokens", 4)
    for _ in range(2):
        assert run("bench", "--addr", server.addr, *few) == 0
    asked = [call for call in server.calls if hasattr(call, "cache")]
    runs = asked[:3], asked[3:]  # a warm-up and two requests each
    assert [len({call.cache.cache_salt for call in calls}) for calls in runs] == [1, 1]
    assert runs[0][0].cache.cache_salt != runs[1][0].cache.cache_salt
    assert all(call.cache.cache_salt for call in asked)
    ids = [sorted(tuple(call.prompt_token_ids.ids) for call in calls) for calls in runs]
    assert ids[0] == ids[1]


def test_bench_refuses_what_the_context_would_cut_short(server, capsys):
    assert run("bench", "--addr", server.addr, "--prompt-tokens", 60, "--max-tokens", 5) == 1
    assert "60 prompt tokens and 5 more do not fit the context of 64 tokens" in capsys.readouterr().err
    assert not [call for call in server.calls if isinstance(call, inference_pb2.StreamRequest)]
    assert run("bench", "--addr", server.addr, "--prompt-tokens", 60, "--max-tokens", 4, "--requests", 1) == 0


def test_bench_shows_its_figures_also_when_they_cannot_be_written(server, capsys, tmp_path):
    file = tmp_path / "missing" / "report.json"
    few = ("--requests", 1, "--prompt-tokens", 3, "--max-tokens", 4)
    assert run("bench", "--addr", server.addr, *few, "--output", file) == 1
    shown = capsys.readouterr()
    assert "1 completed, 0 failed" in shown.out
    assert shown.err.endswith(f"penstock bench: cannot write {file}: No such file or directory\n")


def test_bench_counts_failures_and_says_so(server, failure, capsys):
    server.stream_failure = failure(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full")
    assert run("bench", "--addr", server.addr, "--requests", 3, "--prompt-tokens", 3, "--max-tokens", 4) == 1
    shown = capsys.readouterr()
    assert "0 completed, 3 failed" in shown.out
    assert "failed 3 times: QUEUE_FULL: full" in shown.out
    assert "3 of 3 requests failed" in shown.err


@pytest.mark.ci
def test_bench_reports_what_it_has_on_ctrl_c(server, tmp_path):
    """Two of five requests are answered, then the server sends nothing more."""

    def asked():
        return sum(isinstance(call, inference_pb2.StreamRequest) for call in server.calls)

    def replies(request):
        if asked() > 2:
            server.cancelled.wait(120)
        return server.replies

    server.next_replies = replies
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "penstock.cli", "bench", "--addr", server.addr, "--requests", "5"]
    few = ["--prompt-tokens", "6", "--max-tokens", "4", "--concurrency", "1", "--warmup", "0"]
    limit = time.monotonic() + 60
    with subprocess.Popen(
        [*command, *few, "--output", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        while asked() < 3:
            assert time.monotonic() < limit
            time.sleep(0.02)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=60)
    assert program.returncode == 130
    assert "2 completed, 0 failed" in out
    assert err == "penstock bench: interrupted: the figures are of 2 of 5 requests\n"
    document = json.loads(file.read_text())
    assert (document["interrupted"], document["report"]["completed"]) == (True, 2)


@pytest.mark.parametrize("flags", [["--requests", "0"], ["--concurrency", "0"], ["--request-rate", "0"]])
def test_bench_refuses_senseless_numbers(capsys, flags):
    with pytest.raises(SystemExit) as caught:
        run("bench", *flags)
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err
