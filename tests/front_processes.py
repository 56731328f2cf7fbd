"""Tests' servers have front processes where PENSTOCK_TEST_FRONT_PROCESSES says how many.

tests/service/relay/test_all_tests.py runs tests so that know nothing of front processes: all that they say
of a server must be true of such a one, too.
"""

from __future__ import annotations

import os

VARIABLE = "PENSTOCK_TEST_FRONT_PROCESSES"
FRONT_PROCESSES = int(os.environ.get(VARIABLE, "0"))
"""How many front processes a server has unless its test says."""
FLAGS = ("--front-processes", str(FRONT_PROCESSES))
"""The same for a command line."""
