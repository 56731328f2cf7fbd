"""The parts of bench/rivals that need no rival installed."""

from __future__ import annotations

from itertools import count

from bench.rivals.environments import RIVALS, Rival, install_commands, variables
from bench.rivals.stepped import SteppedDriver
from bench.workloads import Job


class OneEach:
    """An engine that gives every queued request one token a step, and `first` tokens in its first step."""

    def __init__(self, first=1):
        self.first = first
        self.left = {}
        self.added = []

    def add(self, number, job):
        self.added.append((number, job.max_tokens))
        self.left[number] = [self.first] + [1] * (job.max_tokens - self.first)

    def step(self):
        made = {number: todo.pop(0) for number, todo in self.left.items()}
        self.left = {number: todo for number, todo in self.left.items() if todo}
        return made


def clock():
    """Make a clock whose readings are one second apart."""
    ticks = count()
    return lambda: float(next(ticks))


def test_tokens_are_noted_with_the_step_that_made_them():
    # Readings: 0 and 1 are the submissions, 2, 3, 4 the ends of the steps.
    one, other = SteppedDriver(OneEach(), clock()).run_wave([Job((1, 2), 3), Job((1,), 1)])
    assert (one.sent, one.arrivals, one.ended) == (0.0, ((2.0, 1), (3.0, 1), (4.0, 1)), 4.0)
    assert (other.sent, other.arrivals, other.ended) == (1.0, ((2.0, 1),), 2.0)
    assert (one.prompt_tokens, other.prompt_tokens) == (2, 1)


def test_late_jobs_wait_for_the_early_ones():
    engine = OneEach()
    early, late = SteppedDriver(engine, clock()).run_wave([Job((1,), 4), Job((1,), 1, after_tokens=2)])
    # 0: early sent; steps end at 1 and 2; 3: late sent; steps end at 4, 5.
    assert early.arrivals == ((1.0, 1), (2.0, 1), (4.0, 1), (5.0, 1))
    assert (late.sent, late.arrivals) == (3.0, ((4.0, 1),))


def test_numbers_are_never_used_twice():
    engine = OneEach()
    driver = SteppedDriver(engine, clock())
    for _ in range(2):
        driver.run_wave([Job((1,), 2), Job((1,), 3)])
    assert engine.added == [(0, 2), (1, 3), (2, 2), (3, 3)]


def test_environment():
    rival = Rival("m", ("p==1",), ("q==2",), {"LD_PRELOAD": "{folder}/x.so", "A": "1"})
    assert variables(rival, "/f", {"LD_PRELOAD": "y.so", "B": "2"}) == {
        "LD_PRELOAD": "y.so:/f/x.so",
        "A": "1",
        "B": "2",
    }
    assert variables(rival, "/f", {})["LD_PRELOAD"] == "/f/x.so"
    make, install = install_commands(rival, "uv", "/f", "/o.txt")
    assert make == ["uv", "venv", "--python", "3.11", "/f"]
    assert install == ["uv", "pip", "install", "--python", "/f/bin/python", "p==1", "--override", "/o.txt"]


def test_without_overrides_none_are_passed():
    assert "--override" not in install_commands(RIVALS["openvino"], "uv", "/f", "/o.txt")[1]
