"""A program in another process that answers, and a driver there with a made-up engine."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from bench.child import Child
from bench.drivers.side import Side
from bench.workloads import Job
from penstock.cli.measuring.stats import RequestTrace

ROOT = Path(__file__).parents[2]


def start(code):
    """Start a side that runs `code` before it serves `driver`."""
    before = (
        "import sys\nfrom bench.child import own_output\nfrom bench.drivers.side import RequestTrace, serve\n"
    )
    after = '\nserve(driver, {"ready_s": 1.5}, sys.stdin, answers)\n'
    path = os.pathsep.join([str(ROOT), *sys.path])
    script = before + textwrap.dedent(code) + after
    return Side([sys.executable, "-c", script], {**os.environ, "PYTHONPATH": path})


ENGINE = """
    class Driver:
        def run_wave(self, jobs):
            print("the engine says something")
            if jobs[0].max_tokens == 0:
                raise ValueError("nothing asked")
            arrivals = ((0.2, 1), (0.30000000000000004, jobs[0].max_tokens))
            return [RequestTrace(0.1, arrivals, 0.5, len(job.token_ids)) for job in jobs]

        def about_repeat(self):
            return {"peak_rss_bytes": 7}

    answers, driver = own_output(), Driver()
"""


def test_waves_and_errors_come_through():
    side = start(ENGINE)
    try:
        side.wait_until_up()
        assert side.startup == {"ready_s": 1.5}
        arrivals = ((0.2, 1), (0.30000000000000004, 3))
        assert side.run_wave([Job((5, 6), 3), Job((7,), 3, after_tokens=1)]) == [
            RequestTrace(0.1, arrivals, 0.5, 2),
            RequestTrace(0.1, arrivals, 0.5, 1),
        ]
        with pytest.raises(ValueError, match="nothing asked"):
            side.run_wave([Job((5,), 0)])
        assert side.about_repeat() == {"peak_rss_bytes": 7}
    finally:
        side.close()


def test_an_engine_that_does_not_come_up():
    side = start("sys.exit(3)")
    try:
        with pytest.raises(RuntimeError, match="ended with 3"):
            side.wait_until_up()
    finally:
        side.close()


def test_an_engine_that_dies_in_a_wave():
    side = start(ENGINE + "    Driver.run_wave = lambda self, jobs: sys.exit(4)\n")
    try:
        side.wait_until_up()
        for _ in range(2):  # works also when the process is known to be gone
            with pytest.raises(RuntimeError, match="ended with 4"):
                side.run_wave([Job((5,), 1)])
    finally:
        side.close()


def test_what_hangs_is_killed():
    child = Child(
        [sys.executable, "-c", "while True: pass"], {**os.environ, "PYTHONPATH": str(ROOT)}, stop_s=0.1
    )
    child.close()
    assert child._process.returncode == -9


def test_only_answers_come_through():
    code = """if True:
        import os, sys
        from bench.child import answer, own_output
        answers = own_output()
        for line in sys.stdin:
            print("not an answer")
            os.write(1, b"nor this, which a library of C might print")
            answer({"asked": line.strip()}, answers)
    """
    child = Child([sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        assert child.ask({"number": 1}) == {"asked": '{"number": 1}'}
        assert child.ask({"number": 2}) == {"asked": '{"number": 2}'}
    finally:
        child.close()
    assert child._process.returncode == 0
