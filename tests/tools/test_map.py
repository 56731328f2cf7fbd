"""The map of the code, made of the modules' docstrings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import map as tool


def test_a_folder_its_modules_and_what_is_below(tmp_path: Path) -> None:
    (tmp_path / "part" / "below").mkdir(parents=True)
    (tmp_path / "part" / "none").mkdir()
    (tmp_path / "part" / "__init__.py").write_text('"""The part."""\n')
    (tmp_path / "part" / "long_name.py").write_text(
        '"""Does one thing, e.g. this\nor that. Also more.\n\nAnd."""'
    )
    (tmp_path / "part" / "mute.py").write_text("X = 1\n")
    (tmp_path / "part" / "below" / "deep.py").write_text('"""Deep."""')
    assert list(tool.lines(tmp_path, tmp_path / "part")) == [
        "",
        "part/  The part.",
        "  long_name.py  Does one thing, e.g. this or that.",
        "  mute.py",
        "",
        "part/below/",
        "  deep.py  Deep.",
    ]


@pytest.mark.ci
def test_every_module_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  core.py ") and "EngineCore" in line for line in printed)
    assert [line for line in printed if line.endswith(".py")] == []


@pytest.mark.parametrize("folder", ["nowhere", "/"])
def test_what_is_no_folder_here_is_refused(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main([folder])
    assert f"{folder} is no folder of this repository" in capsys.readouterr().err
