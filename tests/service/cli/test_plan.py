"""`penstock plan` through main(): what it prints, and its exit codes. The numbers are tested in
tests/runtime/planning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.__main__ import main
from penstock.runtime.config import EngineConfig
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.planning import absent
from penstock.runtime.planning.chips import Machine
from tests.support.goldens import GOLDEN
from tests.support.models.configs import published

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `penstock plan ...`. Returns exit code, stdout and stderr."""
    monkeypatch.setattr(absent, "prepare", lambda: None)  # this process goes on with other tests

    def command(*arguments: str) -> tuple[int, str, str]:
        code = main(["plan", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(published("Qwen3-8B")))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("bert", "BertModel"), ("llama_classifier", "LlamaForSequenceClassification")],
)
def test_what_generates_nothing_is_refused(run: Run, name: str, architecture: str) -> None:
    code, _, problem = run(str(GOLDEN / "encoders" / name))
    assert code == 1
    assert f"{architecture} generates nothing, and plans are made of models that do" in problem


@pytest.mark.ci
def test_the_smallest_machine_that_holds_the_rows(run: Run, qwen: str) -> None:
    """32 rows of 8,192 tokens need 38.7 GB of cache beside 16.4 GB of weights: three v5e would do."""
    code, shown, _ = run(qwen, "--context", "8192", "--rows", "32")
    assert code == 0
    *table, verdict = shown.splitlines()
    assert verdict == "The machine with the least memory that holds 32 rows of 8,192 tokens: tpu-v5e-4."
    fits = {line.split()[0]: line.split()[3] for line in table[1:]}
    assert (fits["tpu-v5e-2"], fits["tpu-v5e-4"], fits["rtx4090"]) == ("no", "yes", "no")


def test_one_machine(run: Run, qwen: str) -> None:
    code, shown, _ = run(qwen, "--for", "h100-2", "--context", "8192", "--rows", "32")
    assert code == 0
    lines = shown.splitlines()
    assert lines[0] == "32 rows of 8,192 tokens fit on h100-2. Sizes are those of each device."
    assert "  weights   7.63 GiB" in lines  # half of 8,190,735,360 numbers of 2 bytes; norms are whole
    assert any(line.startswith("  decode    32 tokens: ") and line.endswith(", by memory") for line in lines)


def test_json_of_what_does_not_fit(run: Run, qwen: str) -> None:
    code, shown, _ = run(qwen, "--for", "rtx4090", "--rows", "64", "--context", "8192", "--json")
    assert code == 1
    told = json.loads(shown)
    assert told["smallest"] is None
    (machine,) = told["machines"]
    assert machine["weight_bytes"] == 16_381_470_720
    assert "64 rows need" in machine["problem"]
    assert machine["decode"]["tokens"] == 64


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--for", "abacus"], "for: abacus is no chip of the table"),
        (["--compile"], "compile: say for which chip, with --for"),
        (["--context", "99999"], "max_model_len: 99999 is more than the model's own 40960"),
        (["--rows", "0"], "max_num_seqs: must be from 1 to 4096, not 0"),
        (["--draft-model", "nowhere"], "draft_model: nowhere is no folder that holds config.json"),
        (["--draft-model", str(GOLDEN / "lfm2")], "it has a recurrent state"),
        (["--draft-model", str(GOLDEN / "llama")], "draft_model: it reads at most 1024 tokens"),
        (
            ["--draft-model", str(GOLDEN / "llama"), "--for", "tpu-v5e", "--compile"],
            "draft_model: it reads at most 1024 tokens",
        ),
        (
            ["--for", "h100-2", "--expert-parallel"],
            "h100-2: expert_parallel: must be left out: Qwen3ForCausalLM has no experts here",
        ),
        (
            ["--for", "h100-3", "--pipeline-parallel-size", "2"],
            "h100-3: pipeline_parallel_size: 3 devices cannot be dealt to 2 stages",
        ),
        (
            ["--for", "h100-2", "--pipeline-parallel-size", "2", "--compile"],
            "compile: must be left out with stages",
        ),
    ],
)
def test_what_is_refused(run: Run, qwen: str, arguments: list[str], problem: str) -> None:
    code, shown, told = run(qwen, *arguments)
    assert code == 1
    assert problem in shown + told


def test_a_model_is_dealt_as_the_server_deals_it(run: Run) -> None:
    """Of DeepSeek's golden a token has 48 numbers of 4 bytes in 3 layers, half of them on each of two
    devices.
    """
    ways = ("--expert-parallel", "--context-parallel")
    _, shown, _ = run(str(GOLDEN / "deepseek_v3"), "--for", "h100-2", "--context", "64", "--json", *ways)
    (machine,) = json.loads(shown)["machines"]
    assert machine["kv_bytes_per_row"] == 64 * 3 * 48 * 4 // 2


def test_what_cannot_be_cut_is_not_compiled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "compiled_temp_bytes", lambda *_: pytest.fail("programs are compiled"))
    code, shown, _ = run(str(GOLDEN / "bamba"), "--for", "tpu-v5e-4", "--compile")
    assert code == 1
    assert "tpu-v5e-4: tensor_parallel_size: BambaForCausalLM cannot be cut over 4 devices" in shown


def test_a_draft_does_not_go_with_dealt_pages(run: Run) -> None:
    latent = str(GOLDEN / "deepseek_v3")
    code, shown, _ = run(latent, "--for", "h100-2", "--context-parallel", "--draft-model", latent)
    assert code == 1
    assert "h100-2: draft_model: does not go with context_parallel" in shown


def test_the_programs_of_a_draft_are_compiled(run: Run, qwen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compiled(config: ModelConfig, machine: Machine, options: EngineConfig, draft: ModelConfig) -> int:
        asked.append((config, machine.name, options.speculation, draft))
        return 2**30

    monkeypatch.setattr(absent, "compiled_temp_bytes", compiled)
    given = ("--for", "h200", "--context", "1024", "--compile", "--draft-model", qwen)
    code, shown, _ = run(qwen, *given)
    assert code == 0
    assert "  scratch   1.00 GiB, as XLA reports" in shown.splitlines()
    ((config, name, speculation, draft),) = asked
    assert (name, speculation, draft) == ("h200", "draft", config)


def test_a_folder_without_config_json_is_refused(run: Run, tmp_path: Path) -> None:
    code, _, told = run(str(tmp_path))
    assert code == 1
    assert "is no folder that holds config.json" in told


def test_a_compiler_that_is_missing_is_named(run: Run, qwen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "lacking", lambda chip: "libtpu")
    code, _, told = run(qwen, "--for", "tpu-v5e", "--compile")
    assert code == 1
    assert "compile: libtpu is not installed, which compiles for tpu-v5e" in told
    assert "pip install 'jax[tpu]'" in told
