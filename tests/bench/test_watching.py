"""The benchmark of metrics and traces: its figures are what they say."""

from __future__ import annotations

import os

from bench.probes.watching.__main__ import BARE, Measured, cpu_s, table


def test_costs_are_medians_over_the_rounds_of_the_loss_in_each() -> None:
    rounds = [
        {BARE: Measured(100.0, 10.0), "steps": Measured(90.0, 12.0)},  # 10 % less
        {BARE: Measured(200.0, 20.0), "steps": Measured(198.0, 14.0)},  # 1 %
        {BARE: Measured(400.0, 30.0), "steps": Measured(380.0, 16.0)},  # 5 %
    ]
    bare, steps = table(rounds).splitlines()[2:]
    assert bare == "| nothing | 200 | 20.0 | 0.0 | 0.0, 0.0, 0.0 |"
    assert steps == "| steps | 198 | 14.0 | 5.0 | 10.0, 1.0, 5.0 |"


def test_processor_time_is_that_of_the_process_itself() -> None:
    before, tick = cpu_s(os.getpid()), 1 / os.sysconf("SC_CLK_TCK")
    used = sum(os.times()[:2])
    while sum(os.times()[:2]) < used + 10 * tick:
        pass
    assert cpu_s(os.getpid()) - before >= 9 * tick
