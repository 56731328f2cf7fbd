"""`penstock compile` through main(): what it refuses, and what it prints. What it writes is tested in
tests/runtime/execution.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from penstock.cli.__main__ import main
from penstock.runtime.execution.program_set import ProgramBuilder
from penstock.runtime.planning import absent
from tests.support.goldens import GOLDEN

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run `penstock compile ...` for the golden qwen3. Returns exit code, stdout and stderr."""
    monkeypatch.setattr(absent, "prepare", lambda: None)  # this process goes on with other tests
    monkeypatch.setattr(jax.config, "update", lambda *_: None)

    def command(*arguments: str) -> tuple[int, str, str]:
        code = main(["compile", str(GOLDEN / "qwen3"), "--out", str(tmp_path / "out"), *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--for", "abacus"], "for: abacus is no chip of the table"),
        (["--for", "cpu", "--max-num-seqs", "0"], "--max-num-seqs: must be from 1 to 4096, not 0"),
        (["--for", "cpu", "--max-model-len", "99999"], "--max-model-len: 99999 is more than the model's own"),
        (["--for", "cpu", "--speculation", "draft"], '--speculation: "draft" needs a --draft-model'),
        (["--for", "cpu", "--speculation", "heads"], "--speculation: Qwen3ForCausalLM has no heads here"),
        (
            ["--for", "cpu", "--speculation", "draft", "--draft-model", str(GOLDEN / "lfm2")],
            "it has a recurrent state, which cannot go back to where a guess was wrong",
        ),
        (["--for", "cpu", "--max-adapter-rank", "5"], "--max-adapter-rank: must be one of 16,"),
    ],
)
def test_what_is_refused(run: Run, arguments: list[str], problem: str) -> None:
    code, _, told = run(*arguments)
    assert code == 1
    assert problem in told


def test_a_compiler_that_is_missing_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "lacking", lambda chip: "libtpu")
    code, _, told = run("--for", "tpu-v5e-4")
    assert code == 1
    assert "libtpu is not installed, which compiles for tpu-v5e-4; for TPUs: pip install" in told


def test_the_options_are_those_of_serve(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[tuple[ProgramBuilder, Path]] = []

    def write(builder: ProgramBuilder, folder: Path) -> int:
        made.append((builder, folder))
        return 12

    monkeypatch.setattr(ProgramBuilder, "write", write)
    options = ["--max-num-seqs", "2", "--max-model-len", "64", "--page-size", "16", "--speculation", "lookup"]
    code, said, _ = run("--for", "cpu", "--json", *options)
    ((builder, folder),) = made
    told = json.loads(said)
    assert (code, folder, told["out"], told["bytes"]) == (0, tmp_path / "out", str(tmp_path / "out"), 12)
    assert told["programs"] == len(builder.jobs())
    config = dataclasses.asdict(builder.config)
    expected = {"max_num_seqs": 2, "max_model_len": 64, "page_size": 16, "checks_proposals": True}
    assert {name: config[name] for name in expected} == expected
