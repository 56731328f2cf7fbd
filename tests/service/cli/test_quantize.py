"""`penstock quantize` through main(): what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.__main__ import main
from penstock.runtime.quantising.layerwise import Score
from penstock.runtime.quantising.options import QuantiseOptions
from penstock.runtime.quantising.quantise import Report
from penstock.server_cli.commands import quantize

REPORT = Report(
    num_quantised=28,
    kept=("model.layers.0.gate",),
    old_bytes=8_000_000,
    new_bytes=2_000_000,
    score=Score(perplexity=10.0, other_perplexity=10.5, kl=0.0123456, agreement=0.9375),
    num_positions=4092,
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what the command asks to be made."""
    calls: list[Any] = []

    def stand_in(source: Path, target: Path, options: QuantiseOptions) -> Report:
        calls.append((source.name, target, options))
        return REPORT

    monkeypatch.setattr(quantize, "quantise", stand_in)
    return calls


def test_the_flags_reach_the_quantiser_and_the_report_is_printed(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--format int8 --group 128 --method awq --calibration t.txt --calibration-tokens 99"
    assert main(["quantize", "demo", "out", *flags.split()]) == 0
    options = QuantiseOptions(
        format="int8", group=128, method="awq", calibration=Path("t.txt"), calibration_tokens=99
    )
    assert asked == [("demo_model", Path("out"), options)]
    shown = capsys.readouterr().out
    assert "out is written" in shown
    assert "28 are in codes; 1 layers stay as they were: model.layers.0.gate" in shown
    assert "8.0 MB became 2.0 MB" in shown
    assert "10.000 became 10.500 (+5.0%), on 4,092 tokens" in shown
    assert "0.01235 nats" in shown
    assert "93.8%" in shown


def test_the_report_as_json(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "demo", "out", "--json"]) == 0
    assert asked[0][2] == QuantiseOptions()
    assert json.loads(capsys.readouterr().out) == {
        "quantised_weights": 28,
        "kept_layers": ["model.layers.0.gate"],
        "old_bytes": 8_000_000,
        "new_bytes": 2_000_000,
        "positions": 4092,
        "perplexity": 10.0,
        "quantised_perplexity": 10.5,
        "kl_nats": 0.0123456,
        "agreement": 0.9375,
    }


def test_what_cannot_be_made_is_told_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "demo", str(tmp_path)]) == 1
    assert f"penstock quantize: {tmp_path} is there already" in capsys.readouterr().err
