"""A program that answers: one that hangs, and one whose libraries print. More is in test_side.py."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from bench.child import Child

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_what_hangs_is_killed():
    child = Child([sys.executable, "-c", "while True: pass"], ENVIRONMENT, stop_s=0.1)
    began = time.monotonic()
    child.close()
    assert time.monotonic() - began < 10
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
    child = Child([sys.executable, "-c", code], ENVIRONMENT)
    try:
        assert child.ask({"number": 1}) == {"asked": '{"number": 1}'}
        assert child.ask({"number": 2}) == {"asked": '{"number": 2}'}
    finally:
        child.close()
    assert child._process.returncode == 0
