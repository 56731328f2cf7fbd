"""Running workloads on a driver, with made-up engines: what is reported, and what failed."""

from __future__ import annotations

import sys

import pytest

from bench import run
from bench.drivers.session import Session, all_ran, measure, shortened
from bench.workloads import TABLE, shrunk
from penstock.cli.measuring.stats import RequestTrace

W1, W3 = (shrunk(TABLE[name], 8) for name in ("W1", "W3"))
ONE_AFTER_THE_OTHER = 0.01
"""Seconds between the tokens of the made-up engines."""


class MadeUp:
    """Answers every request at a fixed pace, up to a given number of waves. Later ones fail."""

    def __init__(self, good_waves=1000):
        self.startup = {}
        self.jobs = []
        self._left = good_waves

    def run_wave(self, jobs):
        self.jobs += jobs
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"refused: {'token ids ' * 1000}")
        return [self._trace(job) for job in jobs]

    def _trace(self, job):
        arrivals = tuple(((i + 1) * ONE_AFTER_THE_OTHER, 1) for i in range(job.max_tokens))
        return RequestTrace(0.0, arrivals, arrivals[-1][0], len(job.token_ids))

    def about_repeat(self):
        return {}

    def close(self):
        pass


def session(said, repeats=2):
    return Session(
        engine="made up",
        options={},
        startup={},
        packages=(),
        workloads=(W1, W3),
        repeats=repeats,
        say=said.append,
    )


def test_all_repeats_of_all_workloads_count():
    plan = session([])
    assert all_ran(measure(MadeUp(), plan), plan)


@pytest.mark.parametrize("good_waves", [0, 2, 3, 5])
def test_a_failure_is_not_taken_for_success(good_waves):
    # Six waves: one to warm up and two that count, of either workload.
    said: list[str] = []
    plan = session(said)
    assert not all_ran(measure(MadeUp(good_waves), plan), plan)
    assert any(line.startswith("W3 failed: refused: token ids") for line in said)
    assert max(len(line) for line in said if "failed" in line) < 400


def test_what_was_proposed_is_in_the_line_of_a_repeat():
    said: list[str] = []
    engine = MadeUp()
    engine.about_repeat = lambda: {"proposed_tokens": 9, "accepted_tokens": 7}  # type: ignore[method-assign]
    measure(engine, session(said, repeats=1))
    assert said[0].endswith(", 7 of 9 proposed tokens accepted")


def test_short_messages_stay_whole():
    assert shortened("refused: no memory") == "refused: no memory"


@pytest.mark.parametrize(("good_waves", "code"), [(1000, 0), (0, 1)])
def test_the_program_draws_ids_that_the_model_has_and_exits_with_the_outcome(monkeypatch, good_waves, code):
    engine = MadeUp(good_waves)
    monkeypatch.setattr(run, "start", lambda args, given: engine)
    monkeypatch.setattr(
        sys, "argv", ["bench.run", "--checkpoint", "demo", "--workloads", "W1", "--repeats", "1"]
    )
    assert run.main() == code
    size = run.vocabulary_size("demo")
    assert engine.jobs
    assert all(0 <= token < size for job in engine.jobs for token in job.token_ids)
