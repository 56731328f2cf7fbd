"""These tests count a toy walk, have broken walks refused, and hold the three real walks to the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.walks import __main__ as tool

FIRST = '''"""First."""

X = 1


class Counter:
    @property
    def value(self) -> int:
        return X

    async def add(
        self,
    ) -> None:
        def one() -> int:
            return 1

        one()
'''
SECOND = """def forward() -> None:
    pass


def forward() -> None:
    other()
    other()
"""
WALK = """# A. There

part/first.py::Counter.value
part/first.py::Counter.add
  part/second.py::forward F

# B. Back
part/first.py::Counter.add.one
part/first.py::Counter
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "first.py").write_text(FIRST)
    (tmp_path / "part" / "second.py").write_text(SECOND)
    return tmp_path


def test_a_walk_is_counted(tree: Path) -> None:
    counted = tool.count(tree, "toy.txt", WALK)
    # The functions have 2, 7, 3 (the second of the name), 2 and 12 lines: decorators are none of them.
    assert counted == tool.Count(hops=5, files=2, forwards=1, function_lines=26, file_lines=24)
    assert list(tool.table({"toy": counted, "long": tool.Count(1, 1, 0, 1, 13715)})) == [
        "| walk | hops | files | forwards | lines of the functions | lines of the files |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| toy | 5 | 2 | 1 | 26 | 24 |",
        "| long | 1 | 1 | 0 | 1 | 13,715 |",
    ]


def test_what_the_code_does_not_have_is_refused_by_name(tree: Path) -> None:
    walk = "# A\npart/first.py::Counter.gone\npart/second.py::forward\npart/third.py::forward F\n"
    with pytest.raises(tool.BrokenWalk) as refused:
        tool.count(tree, "toy.txt", walk)
    assert str(refused.value).splitlines() == [
        "toy.txt, line 2: part/first.py::Counter.gone: the file has no such function or class",
        "toy.txt, line 4: part/third.py::forward: there is no such file",
    ]


@pytest.mark.parametrize("line", ["part/first.py", "part/first.py::", "::f", "a.py::f W", "a.py::f F F"])
def test_a_line_that_is_no_hop_is_refused(line: str, tree: Path) -> None:
    with pytest.raises(tool.BrokenWalk, match=r"toy\.txt, line 2: .* is not PATH::Class\.function"):
        tool.count(tree, "toy.txt", f"# A\n{line}\n")


def test_a_broken_walk_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("tools/walks/__main__.py::gone\n")
    assert tool.main([str(mine)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "mine.txt, line 1: tools/walks/__main__.py::gone: the file has no such function" in printed.err


@pytest.mark.ci
def test_the_three_walks_pass_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    status = tool.main([])
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    assert [line.split()[1] for line in printed.out.splitlines()[2:]] == ["stream", "update", "load"]
