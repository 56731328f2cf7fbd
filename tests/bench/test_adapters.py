"""The adapters of the benches are what PEFT writes, and the tables are what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.checkpoint import SHAPES, tensor_shapes, write_checkpoint
from bench.probes.adapters import disk, pace
from bench.probes.adapters.made import Maker
from penstock.runtime.adapters.peft import AdapterReader
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.models.params import adapted_model


def test_adapters_on_disk_are_read_and_differ(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", SHAPES["tiny"])
    maker = Maker.of(tmp_path / "model", 4)
    layers = [name for name in tensor_shapes(SHAPES["tiny"]) if name.endswith("_proj.weight")]
    assert sorted(f"{name}.weight" for name in maker.shapes) == sorted(layers)
    reader = AdapterReader(adapted_model(load_config(tmp_path / "model")), 16)
    read = []
    for number in range(2):
        maker.write(tmp_path / str(number), number)
        read.append(reader.read(tmp_path / str(number)))
    assert [one.rank for one in read] == [4, 4]
    assert read[0].digest != read[1].digest
    assert read[0].targets == tuple(maker.config["target_modules"])
    (tmp_path / "0" / "adapter_config.json").unlink()
    maker.write(tmp_path / "0", 0)  # a folder that is there stays as it is
    assert not (tmp_path / "0" / "adapter_config.json").exists()


def test_a_ratio_is_that_of_the_turns_of_one_round() -> None:
    """Steps are of none in 10 and 20 ms, of one in 20 and 80 ms: half and a quarter as fast."""
    step, cpu, rate = pace.FIGURES
    none = [{step: 10.0, cpu: 1.0, rate: 100.0}, {step: 20.0, cpu: 1.0, rate: 100.0}]
    one = [{step: 20.0, cpu: 2.0, rate: 50.0}, {step: 80.0, cpu: 4.0, rate: 25.0}]
    lines = pace.table({pace.NONE: none, pace.ONE: one}).splitlines()
    assert lines[2] == "| no adapter | 15.00 | 1.000 | 1.00 | 1.000 | 100.00 | 1.000 |"
    assert lines[3] == "| one for all rows | 50.00 | 0.375 | 3.00 | 0.375 | 37.50 | 0.375 |"
    assert [pace.WAYS[way](3) for way in (pace.NONE, pace.ONE, pace.EACH)] == [
        None,
        "adapter 0",
        "adapter 3",
    ]


def test_requests_keep_their_distance() -> None:
    asked: list[str] = []

    def ask(name: str) -> float:
        asked.append(name)
        return float(len(asked))

    assert disk.paced(["a", "b", "a"], 1e6, ask) == [1.0, 2.0, 3.0]
    assert asked == ["a", "b", "a"]
    assert "| load, ms | 2.0 | 3.0 | 3.0 | 3 |" in disk.table({"load, ms": [1.0, 2.0, 3.0]})


@pytest.mark.sweep
def test_both_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "model", SHAPES["tiny"])
    options = ["--checkpoint", str(tmp_path / "model"), "--set", "kv_cache_bytes=8388608"]
    monkeypatch.setattr("sys.argv", ["pace", *options, "--rounds", "1", "--num-words", "200"])
    assert pace.main() == 0
    out = capsys.readouterr().out
    assert "| another one for each row |" in out
    assert "compiles after warm-up: 0" in out
    small = ["--count", "12", "--cached", "6", "--loads", "2", "--seconds", "1", "--rows", "2"]
    folders = ["--adapters", str(tmp_path / "adapters"), "--logs", str(tmp_path / "logs")]
    places = ["--set", "max_adapters=3", "--set", "max_model_len=512"]
    monkeypatch.setattr("sys.argv", ["disk", *options, *small, *folders, *places])
    assert disk.main() == 0
    assert "of their pace" in capsys.readouterr().out
