"""The engine's and the server's own tests, with goldens whose layers are cut into two to four stages:
schedules in chunks, preempted, and with a shared prefix, log-probabilities, hidden states, a cache of int8,
grammars, pauses and weight updates are as on one device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GOLDENS = "tests/service/servicers/test_goldens.py"
PLAIN = "qwen3 and not qwen3_5"
SCHEDULES = f"{GOLDENS}::test_every_schedule_gives_pytorchs_tokens"
KINDS = (
    ("deepseek_v3", 2, 2),  # latent attention
    ("gemma2", 2, 1),  # windows and caps
    ("gemma4", 2, 1),  # shared keys and values, and embeddings for each layer
    ("gpt_oss", 2, 2),  # sinks
    ("gpt_oss", 3, 1),
    ("gpt_oss", 4, 1),
    ("granite_hybrid", 2, 1),  # Mamba-2
    ("lfm2", 2, 2),  # short convolutions
    ("mistral_swa", 2, 1),  # one window for all layers
    ("qwen3_5", 3, 1),  # gated delta nets
    ("qwen3_5", 4, 1),
)
"""A golden for each kind of layer, the number of its stages, and of the devices of each stage. A run draws it
together with the other tests of its golden.
"""


@pytest.mark.parametrize(
    ("name", "stages", "devices"),
    [
        pytest.param("qwen3", 2, 1, marks=pytest.mark.ci),
        *(pytest.param(*kind, marks=pytest.mark.sweep) for kind in KINDS),
    ],
)
def test_schedules_in_stages_give_pytorchs_tokens(name: str, stages: int, devices: int) -> None:
    passes((f"{SCHEDULES}[xla-{name}]",), stages, devices)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("tests", "devices"),
    [
        pytest.param(tests, devices, id=name)
        for name, tests, devices in (
            ("native", (GOLDENS, "-k", "native-lfm2 or native-olmo2"), 1),
            (
                "prompt_logprobs",
                ("tests/runtime/engine/answers/test_engine_prompt_logprobs.py", "-k", PLAIN),
                1,
            ),
            (
                "hidden_states",
                ("tests/runtime/engine/answers/test_engine_hidden_states.py", "-k", PLAIN),
                1,
            ),
            ("int8_kv", ("tests/runtime/engine/answers/test_int8_kv.py", "-k", "qwen3"), 1),
            ("changes", ("tests/runtime/engine/test_golden_changes.py",), 1),
            ("changes_2x2", ("tests/runtime/engine/test_golden_changes.py",), 2),
        )
    ],
)
def test_what_holds_on_one_device_holds_in_two_stages(tests: tuple[str, ...], devices: int) -> None:
    passes(tests, 2, devices)


def passes(tests: tuple[str, ...], stages: int, devices: int) -> None:
    """Run tests with goldens that are cut so; none may fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "", *tests]
    environment = os.environ | {"PENSTOCK_TEST_STAGES": str(stages), "PENSTOCK_TEST_DEVICES": str(devices)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
