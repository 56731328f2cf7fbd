"""Loops of the native kernels (src/common/parallel.h), compiled with a thread pool of the tests."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.runtime.ops.native.build import COMPILERS, SOURCES

SUPPORT = Path(__file__).parents[3] / "support" / "native" / "loops"
COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)

# Their loops are compiled anew in each run.
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine"),
]


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("loops") / "loops.so"
    files = [str(SUPPORT / "loops.cc"), str(SOURCES / "common" / "limits.cc")]
    subprocess.run(
        [
            str(COMPILER),
            *("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread"),
            *(f"-I{SUPPORT}", f"-I{SOURCES}", "-o", str(path), *files),
        ],
        check=True,
    )
    library = ctypes.CDLL(str(path))
    library.run.restype = ctypes.c_int64
    library.run.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    library.fail.argtypes = [ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p]
    library.penstock_limit_threads.argtypes = [ctypes.c_int64]
    return library


@pytest.fixture
def limit(loops: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[int]:
    loops.penstock_limit_threads(request.param)
    yield request.param
    loops.penstock_limit_threads(2**63 - 1)


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 1000])
def test_every_call_is_made_once(loops: ctypes.CDLL, threads: int, count: int) -> None:
    calls = np.zeros(count, np.int32)
    used = min(max(threads, 1), count)
    assert loops.run(threads, count, used, calls.ctypes.data) == used
    assert (calls == 1).all()


@pytest.mark.parametrize("limit", [1, 2, 4], indirect=True)
def test_no_more_threads_than_the_limit(loops: ctypes.CDLL, limit: int) -> None:
    calls = np.zeros(500, np.int32)
    assert loops.run(8, len(calls), limit, calls.ctypes.data) == limit
    assert (calls == 1).all()


@pytest.mark.parametrize("in_caller", [0, 1])
def test_an_exception_of_a_call_reaches_the_loops_caller(loops: ctypes.CDLL, in_caller: int) -> None:
    """This holds whichever thread throws it. Calls that have not begun are left out."""
    for _ in range(5):
        calls = np.zeros(400, np.int32)
        assert loops.fail(len(calls), in_caller, calls.ctypes.data) == 1
        assert 2 <= calls.sum() < len(calls)
        assert (calls <= 1).all()
