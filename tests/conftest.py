"""Settings of the whole suite, and which of its tests run.

JAX reads its settings from the environment when it is first imported, so tests that need no JAX load none.

- PENSTOCK_TEST_PLATFORM=cuda runs the suite, and the tests marked `gpu`, on a GPU; the default is the CPU.
- PENSTOCK_TEST_DEVICES=2 makes so many devices of the CPU, over which goldens are cut. With
  PENSTOCK_TEST_DEALT_PAGES=1 the pages of caches are dealt over them, which only latent attention allows.
- PENSTOCK_TEST_STAGES=2 cuts the layers of goldens into so many stages, each with devices of its own.
- PENSTOCK_TEST_XLA=users compiles all programs as users compile them. The default, `quick`, compiles them as
  tests/support/suite/quick_xla.py says, except in files that are marked `users_xla` or drawn.
- `--draw NUMBER` and `--touched REVISION` choose tests of the sweep: see tests/support/suite/drawing.py.
- `--hypothesis-profile` names one of the profiles below.
"""

import functools
import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.front_processes import FRONT_PROCESSES
from tests.support.suite import drawing, quick_xla
from tests.support.suite.costs import Costs
from tests.support.suite.disk import FixtureFolders

PLATFORM = os.environ.get("PENSTOCK_TEST_PLATFORM", "cpu")
USERS_XLA = os.environ.get("PENSTOCK_TEST_XLA", "quick") == "users"
ROOT = Path(__file__).parents[1]

os.environ["JAX_PLATFORMS"] = PLATFORM
os.environ["JAX_NUM_CPU_DEVICES"] = str(
    int(os.environ.get("PENSTOCK_TEST_DEVICES", "1")) * int(os.environ.get("PENSTOCK_TEST_STAGES", "1"))
)
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ.update(quick_xla.environment(users=USERS_XLA))
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded: a test that tried would fail at once

if importlib.util.find_spec("penstock.runtime"):  # the client's tests also run where no server is installed
    from penstock.runtime.config import EngineConfig

    # Engines of the suite propose nothing unless a test says so: each would compile more programs.
    defaults = EngineConfig.__init__.__kwdefaults__
    assert defaults is not None, "the options are keyword-only"
    defaults["speculation"] = "off"

# An example may take any time, because the machine may be busy; hypothesis allows 200 ms otherwise.
settings.register_profile("penstock", deadline=None)
# CI draws the same examples each time, so that none refuses a commit that did not touch what it fails.
settings.register_profile("penstock-ci", deadline=None, derandomize=True)
# `make test` has this one, and draws fewer examples of each test: see `draw_fewer_examples`.
settings.register_profile("penstock-few", deadline=None)
settings.load_profile("penstock")

gc.disable()  # until all tests are collected: that makes a million objects, which all stay

# If a shell starts the suite in the background, the suite ignores Ctrl-C, and so would every program that it
# starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


SWEEP_S = 1200
"""A test of the sweep may take so long, unless it says otherwise: some build with Go or Maven, which download
what they need first.
"""
FEWER = 3
"""`make test` draws one example for so many that CI draws. They are new ones each time."""
PARTS = drawing.FRONT_PARTS if FRONT_PROCESSES else drawing.SWEEP_PARTS
"""Of so many parts of the tests that are drawn, a run with `--draw` has one."""
LONGEST = tuple((ROOT / "tests" / "support" / "suite" / "longest.txt").read_text().split())
"""The files that take longest, which start first. `pytest --durations=0` finds them."""
APART = ("tests/service/relay/test_all_tests.py",)
"""Files whose tests share nothing, and take minutes each: workers take them one by one."""
_ENGINE = "tests/runtime/engine"
_WEIGHTS = "tests/service/weights"
_OUTSIDE = "tests/service/openai/outside"
TOGETHER = (
    (
        "tests/service/servicers/test_goldens.py",
        f"{_ENGINE}/answers/test_engine_hidden_states.py",
        f"{_ENGINE}/answers/test_engine_prompt_logprobs.py",
        "tests/service/weights/test_fresh.py",
    ),
    (f"{_ENGINE}/state/test_state_by_slot.py", f"{_ENGINE}/state/test_snapshots.py"),
    (f"{_ENGINE}/test_engine_sampling.py", f"{_ENGINE}/test_engine_constraints.py"),
    (f"{_ENGINE}/test_speculation.py", f"{_ENGINE}/test_draft_model.py"),
    (f"{_WEIGHTS}/test_policies.py", f"{_WEIGHTS}/test_across_an_update.py"),
    tuple(
        f"{_OUTSIDE}/test_{name}.py"
        for name in ("libraries", "schemathesis", "comply", "compatible_tester", "canary")
    ),
)
"""Files whose engines have the same programs, or which ask one server: one worker takes them, so that it
compiles once, or starts the server once.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("penstock", "which tests of Penstock's sweep run")
    group.addoption(
        "--draw",
        type=int,
        metavar="NUMBER",
        help="of the tests of the sweep, run the seventh that this number draws, for example a commit's; and "
        "compile the thirteenth of the files that it draws as users compile (default: the whole sweep)",
    )
    group.addoption(
        "--touched",
        metavar="REVISION",
        help="with --draw: run also every test of the sweep that the changes since this commit touch",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs())
    config.pluginmanager.register(FixtureFolders())


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what was drawn, so that it can be repeated."""
    number, revision = config.getoption("draw"), config.getoption("touched")
    if number is None:
        return [f"programs: compiled {'as users compile' if USERS_XLA else 'quickly'}"]
    part, users = number % PARTS, number % drawing.OPTIMIZED_PARTS
    lines = [
        f"drawn by {number}: part {part} of {PARTS} of the sweep",
        f"compiled as users compile: part {users} of {drawing.OPTIMIZED_PARTS} of the files",
        f"to repeat it: make test-ci DRAW={number} TOUCHED={revision or ''}",
    ]
    if revision:
        changes = changes_since(revision)
        names = sorted(changes.places | changes.families | changes.pages | changes.built)
        told = ", ".join(names) or "nothing"
        lines.insert(2, f"touched since {revision}, whose sweeps run whole, but for COSTLY files: {told}")
    return lines


@functools.cache
def changes_since(revision: str | None) -> drawing.Touched:
    if not revision:
        return drawing.Touched()
    command = ["git", "diff", "--name-only", revision]
    changed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return drawing.touched(changed.splitlines(), ROOT)


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number = config.getoption("draw")
    if number is not None:
        changes = changes_since(config.getoption("touched"))
        kept: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            key = drawing.sweep_key(item)
            drawn = key.part(drawing.GOLDEN_NAMES, PARTS) == number % PARTS
            is_sweep = item.get_closest_marker("sweep") is not None
            always = not drawing.needs_draw(is_sweep, FRONT_PROCESSES > 0, changes)
            runs = drawn or key in changes or always
            (kept if runs else left_out).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    for item in items:
        if item.get_closest_marker("sweep") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SWEEP_S))
        if PLATFORM == "cpu" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: PENSTOCK_TEST_PLATFORM=cuda"))
    if config.getoption("--hypothesis-profile", None) == "penstock-few":
        draw_fewer_examples(items)
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.split("::")[0], len(places)))


def draw_fewer_examples(items: Iterable[pytest.Item]) -> None:
    """Divide the number of examples of every test of hypothesis by FEWER, also where a test names its number.
    Hypothesis has no public way to change that of a test that exists.
    """
    name = "_hypothesis_internal_use_settings"
    tests = {test for item in items if hasattr(test := getattr(item, "obj", None), name)}
    for test in tests:
        own = getattr(test, name)
        setattr(test, name, settings(own, max_examples=-(-own.max_examples // FEWER)))


def pytest_collection_finish() -> None:
    """By now the files of tests have imported JAX, if any of them needs it."""
    gc.freeze()
    gc.enable()
    if "jax" in sys.modules:
        from tests.support.suite import compiling  # noqa: PLC0415  # imports JAX

        compiling.compile_less()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "tests.support.suite.compiling" in sys.modules:
        file, number = item.nodeid.split("::")[0], item.config.getoption("draw")
        sys.modules["tests.support.suite.compiling"].optimize(
            USERS_XLA
            or item.get_closest_marker("users_xla") is not None
            or (number is not None and drawing.is_optimized(file, number))
        )


@pytest.fixture(scope="module", autouse=True)
def programs() -> Iterator[None]:
    """Engines that are alike compile once in a process; see `shared_programs`. A file that has imported no
    engine needs none, and must not wait for JAX.
    """
    if "penstock.runtime.execution.program_set" not in sys.modules:
        yield
        return
    from tests.support.suite.programs import shared_programs  # noqa: PLC0415 # it imports JAX

    with shared_programs():
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let the tests of a file share a worker, and what they set up; those of APART do not, and the files of
    TOGETHER do, too.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415  # only where xdist is

    first = {file: files[0] for files in TOGETHER for file in files}

    class Files(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return nodeid if file in APART else first.get(file, file)

    config.option.loadscopereorder = False  # the order of LONGEST stays
    return Files(config, log)
