"""The engine's and the server's own tests, with goldens whose layers are cut into two stages, or three:
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
KINDS = "deepseek_v3 or gemma2 or gemma4 or gpt_oss or granite_hybrid or lfm2 or mistral_swa or qwen3_5"
"""Latent attention; windows and caps; shared keys and values, and embeddings for each layer; sinks; Mamba-2;
short convolutions; one window for all layers; gated delta nets."""


@pytest.mark.parametrize(
    ("tests", "stages", "devices"),
    [
        pytest.param(
            (f"{GOLDENS}::test_every_schedule_gives_pytorchs_tokens[xla-qwen3]",),
            2,
            1,
            marks=pytest.mark.ci,
            id="qwen3",
        ),
        *(
            pytest.param(tests, 3 if name == "three" else 2, devices, marks=pytest.mark.sweep, id=name)
            for name, tests, devices in (
                ("kinds", (GOLDENS, "-k", f"xla and ({KINDS})"), 1),
                ("three", (GOLDENS, "-k", "xla and (gpt_oss or qwen3_5)"), 1),
                ("native", (GOLDENS, "-k", "native-lfm2 or native-olmo2"), 1),
                ("2x2", (GOLDENS, "-k", "xla and (deepseek_v3 or lfm2 or gpt_oss)"), 2),
                (
                    "prompt_logprobs",
                    ("tests/runtime/engine/answers/test_engine_prompt_logprobs.py", "-k", "qwen3"),
                    1,
                ),
                (
                    "hidden_states",
                    ("tests/runtime/engine/answers/test_engine_hidden_states.py", "-k", "qwen3"),
                    1,
                ),
                ("int8_kv", ("tests/runtime/engine/answers/test_int8_kv.py", "-k", "qwen3"), 1),
                ("changes", ("tests/runtime/engine/test_golden_changes.py",), 1),
                ("changes_2x2", ("tests/runtime/engine/test_golden_changes.py",), 2),
            )
        ),
    ],
)
def test_what_holds_on_one_device_holds_in_stages(tests: tuple[str, ...], stages: int, devices: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "", *tests]
    environment = os.environ | {"PENSTOCK_TEST_STAGES": str(stages), "PENSTOCK_TEST_DEVICES": str(devices)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
