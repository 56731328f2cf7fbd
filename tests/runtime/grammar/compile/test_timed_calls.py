"""Calls that are waited for only for a limited time."""

import threading

import pytest

from penstock.runtime.errors import GenerationError, UnavailableError
from penstock.runtime.grammar.compile.timed_calls import STACK_BYTES, TimedCalls

PATIENT = 60.0


def test_results_and_errors_come_back():
    calls = TimedCalls(time_limit_s=PATIENT, max_threads=1)
    assert calls.run(lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0)
    assert calls.run(lambda: threading.current_thread().daemon)


class Panic(BaseException):
    """Stands for a panic in Rust: it is not an Exception, so handlers of errors would miss it."""


def test_a_panic_is_an_error():
    def panic() -> None:
        raise Panic("assertion failed")

    calls = TimedCalls(time_limit_s=PATIENT, max_threads=1)
    with pytest.raises(GenerationError, match="Panic: assertion failed"):
        calls.run(panic)
    assert calls.run(lambda: 1) == 1


def test_a_slow_call_is_abandoned_and_counts_until_it_ends():
    calls = TimedCalls(time_limit_s=0.05, max_threads=1)
    done = threading.Event()
    with pytest.raises(TimeoutError):
        calls.run(lambda: done.wait(PATIENT))
    with pytest.raises(UnavailableError):
        calls.run(lambda: 1)
    patient = TimedCalls(time_limit_s=PATIENT, max_threads=1)
    patient._slots = calls._slots
    done.set()
    assert patient.run(lambda: 1) == 1


def test_only_the_threads_of_calls_have_a_deep_stack():
    before = threading.stack_size()
    calls = TimedCalls(time_limit_s=PATIENT, max_threads=1)
    assert calls.run(threading.stack_size) in (before, STACK_BYTES)
    assert threading.stack_size() == before


def test_limits_are_checked():
    with pytest.raises(ValueError, match="time_limit_s"):
        TimedCalls(time_limit_s=0.0, max_threads=1)
    with pytest.raises(ValueError, match="max_threads"):
        TimedCalls(time_limit_s=1.0, max_threads=0)
