"""Neither the package nor the process that tries grammars imports JAX or a transport."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["masks.fill", "compile.compiler", "compile.trial_process"])
def test_loads_little(module):
    program = f"import sys, penstock.runtime.grammar.{module}; print(*sys.modules)"
    loaded = {
        name.partition(".")[0]
        for name in subprocess.check_output([sys.executable, "-c", program], text=True).split()
    }
    assert loaded.isdisjoint({"jax", "jaxlib", "flax", "transformers", "torch", "grpc", "google"})
