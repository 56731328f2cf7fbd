"""Settings of the whole suite.

JAX reads them from the environment when it is first imported, so tests that need no JAX load none.
PENSTOCK_TEST_PLATFORM=cuda runs the suite, and the tests marked `gpu`, on a GPU; the default is the CPU.
"""

import os
import signal

import pytest
from hypothesis import settings

PLATFORM = os.environ.get("PENSTOCK_TEST_PLATFORM", "cpu")

os.environ["JAX_PLATFORMS"] = PLATFORM
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded: a test that tried would fail at once

# An example may take any time, because the machine may be busy; hypothesis allows 200 ms otherwise.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")

# If a shell starts the suite in the background, the suite ignores Ctrl-C, and so would every program that it
# starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


SWEEP_S = 1200
"""A test of the sweep may take so long, unless it says otherwise: some build with Go or Maven, which download
what they need first.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("sweep") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SWEEP_S))
    if PLATFORM == "cpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: PENSTOCK_TEST_PLATFORM=cuda"))
