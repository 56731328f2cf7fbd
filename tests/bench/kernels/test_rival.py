"""The rival of bench.kernels, with a made-up process in place of PyTorch's."""

from __future__ import annotations

import sys
import textwrap

import pytest

from bench.kernels.lines import Product
from bench.kernels.rival import OneDNN


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Make a function that makes an environment whose Python runs the given code instead of a module."""
    monkeypatch.setattr("bench.kernels.rival._REST_S", 0.0)

    def make(code):
        (tmp_path / "program.py").write_text(textwrap.dedent(code))
        python = tmp_path / "bin" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/program.py"\n')
        python.chmod(0o755)
        return tmp_path

    return make


def test_each_dtype_that_onednn_has_is_asked_for(environment):
    # A run of n rows takes n seconds, or n and a half in bfloat16, times the outputs of the last product.
    folder = environment("""
        import json, sys
        from bench.child import answer
        answer({"dtypes": ["float32", "bfloat16"]}, sys.stdout)
        outputs = None
        for question in map(json.loads, sys.stdin):
            if "outputs" in question:
                outputs = question["outputs"]
                answer({}, sys.stdout)
            else:
                more = {"float32": 0.0, "bfloat16": 0.5}[question["dtype"]]
                answer({"seconds": outputs * (question["rows"] + more)}, sys.stdout)
    """)
    rival = OneDNN(folder)
    try:
        rival.prepare(Product("o", outputs=10, inputs=64), least_bytes=1)
        few, many = rival.runners(1, 1e9), rival.runners(4, 1e9)
        assert {name: run() for name, run in few.items()} == {
            "oneDNN float32": 10.0,
            "oneDNN bfloat16": 15.0,
        }
        assert many["oneDNN float32"]() == 40.0
    finally:
        rival.close()


def test_an_environment_without_pytorch(environment):
    with pytest.raises(RuntimeError, match="torch_process ended with 1"):
        OneDNN(environment("raise SystemExit(1)"))
