"""From start to shutdown the process has the engine's switch interval, and afterwards the interval it had
before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.machine.switch_interval import SwitchInterval
from tests.support.models.toy import toy_engine


@pytest.fixture(autouse=True)
def before() -> Iterator[float]:
    """Yield an interval that no test sets."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield sys.getswitchinterval()
    sys.setswitchinterval(interval)


def test_it_is_set_and_restored(before: float) -> None:
    interval = SwitchInterval(0.00012345)  # Python keeps whole microseconds
    interval.restore()
    assert sys.getswitchinterval() == before
    for _ in range(2):
        for _ in range(2):
            interval.apply()
            assert sys.getswitchinterval() == pytest.approx(0.000123)
        for _ in range(2):
            interval.restore()
            assert sys.getswitchinterval() == before


def test_an_interval_that_other_code_set_meanwhile_stays() -> None:
    interval = SwitchInterval(0.0005)
    interval.apply()
    sys.setswitchinterval(0.002)
    interval.restore()
    assert sys.getswitchinterval() == pytest.approx(0.002)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("seconds", [(0.0005, 0.0005), (0.0005, 0.0008)])
def test_the_last_of_several_engines_restores_it(
    before: float, seconds: tuple[float, float], order: tuple[int, int]
) -> None:
    """An engine that still serves keeps its own interval."""
    both = [SwitchInterval(value) for value in seconds]
    for each in both:
        each.apply()
    assert sys.getswitchinterval() == pytest.approx(seconds[1])
    first, second = order
    for _ in range(2):
        both[first].restore()
        assert sys.getswitchinterval() == pytest.approx(seconds[second])
    both[second].restore()
    assert sys.getswitchinterval() == before


def test_none_does_not_change_it(before: float) -> None:
    interval = SwitchInterval(None)
    interval.apply()
    assert sys.getswitchinterval() == before
    sys.setswitchinterval(0.002)
    interval.restore()
    assert sys.getswitchinterval() == pytest.approx(0.002)


def test_an_engine_has_it_from_start_to_shutdown(before: float) -> None:
    engine = toy_engine(start=False, switch_interval_s=0.0007)
    assert sys.getswitchinterval() == before
    try:
        engine.start()
        assert sys.getswitchinterval() == pytest.approx(0.0007)
    finally:
        engine.shutdown()
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-6, 1.5, float("nan"), float("inf")])
def test_intervals_out_of_range_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="switch_interval_s"):
        EngineConfig(switch_interval_s=seconds)
