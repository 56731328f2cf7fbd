"""What joins the devices of a group on CPUs: values are added in the order of the devices, as numpy adds
them, so a row has the same bits whatever is beside it; and each sum or gather is one exchange.
"""

import functools
import json
import subprocess
import sys

import numpy as np
import pytest

from bench.drivers.over_grpc import free_port
from tests.support.group_sums import ROWS, values


def said(processes, devices):
    """Return what each process of a group says."""
    coordinator = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.group_sums"),
                *(str(process), str(processes), str(devices), coordinator),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    lines = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes
    return [json.loads(line.splitlines()[-1]) for line in lines]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("processes", "devices", "collectives"),
    [
        (2, 4, {"summed": {"all-to-all": 1}, "gathered": {"all-to-all": 1}}),
        pytest.param(
            2, 2, {"summed": {"all-to-all": 1}, "gathered": {"all-to-all": 1}}, marks=pytest.mark.sweep
        ),
        pytest.param(
            1, 4, {"summed": {"all-reduce": 1}, "gathered": {"all-gather": 1}}, marks=pytest.mark.sweep
        ),
    ],
)
def test_devices_are_added_in_their_order(processes, devices, collectives):
    given = values(devices)
    for answer in said(processes, devices):
        assert answer["collectives"] == collectives
        assert answer["on TPUs"] == {"summed": {"all_reduce": 1}, "gathered": {"all_gather": 1}}
        for rows in ROWS:
            own = given[:, :rows]
            total = functools.reduce(np.add, own)
            assert answer["summed"][str(rows)] == total.tobytes().hex()
            assert answer["gathered"][str(rows)] == np.concatenate(own, axis=1).tobytes().hex()
