"""The suite's own rules: which tests of the sweep run, what `make test` may cost, and what stays on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import APART, FEWER, LONGEST, TOGETHER, draw_fewer_examples
from tests.support.suite.disk import UNUSED_S, keep_newest, remove_unused
from tests.support.suite.drawing import (
    BUILT,
    COSTLY,
    FRONT_PARTS,
    GOLDEN_NAMES,
    MIRRORED,
    OPTIMIZED_PARTS,
    SWEEP_PARTS,
    SweepKey,
    few,
    is_optimized,
    needs_draw,
    touched,
)
from tests.support.suite.tiers import Placed, told

ROOT = Path(__file__).parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def key(test: str, **told: object) -> SweepKey:
    return SweepKey(test, **told)  # type: ignore[arg-type]


def test_one_run_in_seven_has_a_test_and_one_in_thirteen_compiles_a_file_as_users_do() -> None:
    tests = [f"tests/a/test_b.py::test_c[{number}]" for number in range(300)]
    by_part = Counter(key(test).part(GOLDEN_NAMES) for test in tests)
    assert sorted(by_part) == list(range(SWEEP_PARTS))
    assert min(by_part.values()) > 25
    of_fronts = Counter(key(test).part(GOLDEN_NAMES, FRONT_PARTS) for test in tests)
    assert sorted(of_fronts) == list(range(FRONT_PARTS))
    assert min(of_fronts.values()) > 5
    for file in FILES:
        assert sum(is_optimized(file, number) for number in range(OPTIMIZED_PARTS)) == 1
    drawn = Counter(
        number for file in FILES for number in range(OPTIMIZED_PARTS) if is_optimized(file, number)
    )
    assert min(drawn.values()) > len(FILES) / OPTIMIZED_PARTS / 2


@pytest.mark.parametrize("parts", [SWEEP_PARTS, FRONT_PARTS, OPTIMIZED_PARTS])
def test_every_part_has_its_turn_where_each_push_has_equally_many_commits(parts: int) -> None:
    """CI sees the last commit of a push alone."""
    for commits in range(1, parts):
        assert {commits * push % parts for push in range(parts)} == set(range(parts))


def test_a_family_is_drawn_in_all_files_at_once_and_a_file_that_is_marked_as_a_whole() -> None:
    parts = {
        key(f"tests/{file}::test[{name}]", family=name).part(GOLDEN_NAMES)
        for file in ("a.py", "b.py", "c.py")
        for name in ["qwen3"]
    }
    assert len(parts) == 1
    by_part = Counter(key("a::b", family=name).part(GOLDEN_NAMES) for name in GOLDEN_NAMES)
    assert max(by_part.values()) - min(by_part.values()) <= 1
    of_a_file = {key(f"a.py::test_{n}", is_alone=False).part(GOLDEN_NAMES) for n in range(20)}
    assert len(of_a_file) == 1


def test_tests_that_share_an_engine_are_drawn_together() -> None:
    assert (
        len({key(f"a.py::test[{number}]", shared="engine").part(GOLDEN_NAMES) for number in range(20)}) == 1
    )


def test_a_run_has_all_tests_of_one_thing_that_is_built_and_none_of_the_others() -> None:
    drawn = [
        {key(f"a.py::test[{number}]", shared=word).part(GOLDEN_NAMES) for number in range(20)}
        for word in BUILT
    ]
    assert sorted(part for parts in drawn for part in parts) == list(range(len(BUILT)))
    assert len(BUILT) <= SWEEP_PARTS
    for word, folder in ((word, folder) for word, folders in BUILT.items() for folder in folders):
        changes = touched([f"{folder}/file"], ROOT)
        assert [other for other in BUILT if key("a.py::test", shared=other) in changes] == [word]
        assert key("a.py::test") not in changes


@pytest.mark.parametrize(
    ("changed", "test", "runs"),
    [
        (
            "runtime/penstock/runtime/ops/native/src/linear/linear.cc",
            "tests/runtime/ops/native/test_x.py",
            True,
        ),
        ("runtime/penstock/runtime/ops/native/src/linear/linear.cc", "tests/runtime/ops/test_x.py", False),
        ("runtime/penstock/runtime/config.py", "tests/runtime/ops/test_x.py", False),
        (
            "runtime/penstock/runtime/models/families/encoders.py",
            "tests/runtime/models/test_encoders.py",
            True,
        ),
        ("runtime/penstock/runtime/models/families/olmo.py", "tests/runtime/models/test_encoders.py", False),
        ("tests/golden/encoders/mpnet/expected.json", "tests/runtime/models/test_encoders.py", True),
        ("tests/golden/lora/README.md", "tests/runtime/adapters/test_adapters_golden.py", True),
        ("service/penstock/openai/page/page.js", "tests/service/openai/page/test_x.py", True),
        ("service/penstock/server_cli/commands/serve.py", "tests/service/cli/test_serve.py", True),
        ("clients/go/client.go", "tests/clients/go/test_go.py", True),
        ("protos/penstock/v1/types.proto", "tests/conformance/test_conformance.py", True),
        ("pyproject.toml", "tests/packages/test_wheels.py", True),
        ("tests/storm/test_storm.py", "tests/storm/test_storm.py", True),
        ("tests/storm/test_storm.py", "tests/storm/test_other.py", False),
        ("docs/quickstart.md", "tests/docs/test_blocks.py::test_x[docs/quickstart.md-grpcurl]", True),
        ("docs/quickstart.md", "tests/docs/test_blocks.py::test_x[docs/index.md]", False),
        (
            "tests/runtime/mesh/test_mesh_goldens.py",
            "tests/runtime/mesh/test_mesh_goldens.py::test_x[2-olmo2]",
            False,
        ),
        ("runtime/penstock/runtime/mesh/mesh.py", "tests/runtime/mesh/test_mesh_engine.py", False),
        ("a/file/that/is/gone.py", "tests/docs/test_blocks.py::test_x[docs/index.md]", False),
    ],
)
def test_a_change_runs_the_sweep_of_what_mirrors_it(changed: str, test: str, runs: bool) -> None:
    assert (key(test) in touched([changed], ROOT)) is runs


def test_the_files_that_a_change_does_not_run_whole_are_there() -> None:
    assert [file for file in sorted(COSTLY) if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ("clients/go/client.go", "Go"),
        ("protos/penstock/v1/types.proto", "Go"),
        ("tests/support/native/emulated/cpu.cc", "emulated AMX"),
        ("runtime/penstock/runtime/ops/native/src/linear/linear.cc", "emulated AMX"),
        ("docs/quickstart.md", None),
    ],
)
def test_a_change_runs_what_is_built_of_it(changed: str, word: str | None) -> None:
    assert touched([changed], ROOT).built == ({word} if word else set())


def test_through_front_processes_every_test_is_drawn_unless_the_relay_has_changed() -> None:
    relay = touched(["service/penstock/service/relay/link.py"], ROOT)
    limits = touched(["service/penstock/service/limits/bounds.py"], ROOT)
    assert [needs_draw(False, fronts, limits) for fronts in (False, True)] == [False, True]
    assert not needs_draw(False, True, relay)
    assert needs_draw(True, False, relay)


@pytest.mark.parametrize(
    ("changed", "families"),
    [
        ("runtime/penstock/runtime/models/families/olmo.py", {"flex_olmo", "olmo2", "olmo3", "olmoe"}),
        ("tests/golden/qwen3/config.json", {"qwen3"}),
        ("runtime/penstock/runtime/models/decoder.py", set()),
    ],
)
def test_a_change_of_a_family_runs_its_goldens_everywhere(changed: str, families: set[str]) -> None:
    assert touched([changed], ROOT).families == families


def test_a_case_that_is_marked_but_is_not_there_is_told() -> None:
    """Its name has changed, or is wrong, and the sweep alone would have what CI is to run."""
    assert len(few(["a", "b", "c"], ["a"], ci=["c"])) == 3
    for always, ci in ((["A"], ()), ((), ["A"])):
        with pytest.raises(ValueError, match="'A'"):
            few(["a"], always, ci)


def test_tests_of_what_a_fixture_makes_of_a_case_are_drawn_together() -> None:
    always, *swept = few(["a", "b", "c"], ["a"], shared="engine")
    assert always == "a"
    assert [mark.args for case in swept for mark in case.marks] == [("engine: b",), ("engine: c",)]
    assert [mark.args for case in few(["a"], []) for mark in case.marks] == [()]


def test_what_only_the_sweep_has_is_told_with_how_many_commits_have_some_of_it() -> None:
    """A test that also has a case in another tier is not among it."""
    placed = [
        Placed("a.py::test_b[1]", "sweep", 0),
        Placed("a.py::test_b[2]", "sweep", 3),
        Placed("a.py::test_b[3]", "sweep", 3),
        Placed("a.py::test_c[1]", "ci", 2),
        Placed("a.py::test_c[2]", "sweep", 1),
        Placed("a.py::test_d", "test", 2),
    ]
    sizes, parts, only, *tests = told(placed, parts=4)
    assert sizes == "make test: 1 cases; CI: 1 more; the sweep: 4"
    assert parts.startswith("of the sweep a commit has one part of 4 (1, 1, 0, 2)")
    assert only.startswith("the sweep alone has 1 tests")
    assert tests == ["     3   2  a.py::test_b"]


def test_make_test_draws_fewer_examples_of_a_test_than_it_names() -> None:
    """A test with parameters is several items, and its number is divided once. Others have no examples."""
    drawn: list[int] = []

    @settings(max_examples=4 * FEWER - 1, deadline=None)
    @given(st.integers())
    def example(number: int) -> None:
        drawn.append(number)

    items: list[Any] = [SimpleNamespace(obj=example), SimpleNamespace(obj=example), SimpleNamespace()]
    draw_fewer_examples(items)
    example()
    assert len(drawn) == 4


def test_every_folder_and_file_that_the_rules_name_exists() -> None:
    together = [file for files in TOGETHER for file in files]
    built = [folder for folders in BUILT.values() for folder in folders]
    named = [*MIRRORED, *MIRRORED.values(), *built, *LONGEST, *APART, *together]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_run_that_costs_more_than_the_budget_fails_and_names_the_file(tmp_path: Path) -> None:
    """A suite of one process, whose budget is none."""
    (tmp_path / "test_costly.py").write_text(
        "import subprocess, sys\ndef test_it():\n    subprocess.run([sys.executable, '-c', ''], check=True)\n"
    )
    (tmp_path / "conftest.py").write_text(
        "from tests.support.suite import costs\n"
        "costs.BUDGET = {'processes': 0}\n"
        "def pytest_configure(config): config.pluginmanager.register(costs.Costs())\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path)]
    for workers in ([], ["--numprocesses", "1"]):
        ended = subprocess.run(
            [*command, *workers],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr
        assert "1 passed" in ended.stdout
        assert "test_costly.py" in ended.stdout


def test_the_folder_of_a_fixture_goes_with_it_unless_a_test_failed(tmp_path: Path) -> None:
    """Three files, each with a folder. The third finds only that of the second, whose test failed."""
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "from tests.support.suite.disk import FixtureFolders\n"
        "def pytest_configure(config): config.pluginmanager.register(FixtureFolders())\n"
        "@pytest.fixture(scope='module')\n"
        "def folder(request, tmp_path_factory):\n"
        "    made = tmp_path_factory.mktemp(request.module.__name__)\n"
        "    yield made\n"
        "    assert made.is_dir(), 'it goes after the fixture'\n"
    )
    (tmp_path / "test_a.py").write_text("def test_passes(folder): pass\n")
    (tmp_path / "test_b.py").write_text("def test_fails(folder): assert False\n")
    (tmp_path / "test_c.py").write_text(
        "def test_finds(folder):\n"
        "    assert [(folder.parent / name).is_dir() for name in ('test_a0', 'test_b0', 'test_c0')] == "
        "[False, True, True]\n"
    )
    others = [f"-pno:{name}" for name in ("asyncio", "xdist", "hypothesispytest", "cacheprovider")]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *others, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 2 passed" in ended.stdout, ended.stdout + ended.stderr


def used(path: Path, seconds_ago: float, num_bytes: int = 0) -> Path:
    """Make a file that was used last so long ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(num_bytes))
    os.utime(path, times=(time.time() - seconds_ago,) * 2)
    return path


def test_the_files_that_were_used_longest_ago_go_first(tmp_path: Path) -> None:
    old, new = used(tmp_path / "old", 300, 10), used(tmp_path / "new", 100, 10)
    below = used(tmp_path / "groups" / "between", 200, 10)
    keep_newest(tmp_path, 30)
    assert old.exists()
    keep_newest(tmp_path, 29)
    assert [path.exists() for path in (old, below, new)] == [False, True, True]
    keep_newest(tmp_path, 10)
    assert [path.exists() for path in (below, new)] == [False, True]
    keep_newest(tmp_path / "nothing")


def test_what_another_user_has_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of temporary files are everybody's, and a run must not end because it may not remove a file."""
    files = [used(tmp_path / name, UNUSED_S + 100, 10) for name in "ab"]

    def refused(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refused)
    keep_newest(tmp_path, 10)
    remove_unused(files)
    assert all(file.exists() for file in files)


def test_what_nobody_used_for_long_goes(tmp_path: Path) -> None:
    old, new = used(tmp_path / "old", UNUSED_S + 100), used(tmp_path / "new", UNUSED_S - 100)
    inside = used(tmp_path / "folder" / "file", 0)
    os.utime(inside.parent, times=(0, 0))
    remove_unused([old, new, inside.parent, tmp_path / "gone"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]
