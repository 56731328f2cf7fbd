"""The run on a lent device, without JAX and without a device: fake steps, fake wheels, and what the report
says.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from tools.on_device import plan, steps, wheels
from tools.on_device.__main__ import Files
from tools.on_device.operations import Share, by_scope, device_events, of_decode_steps, shares
from tools.on_device.report import report, why
from tools.on_device.requirements import Requirement, Wheel, choose, fits, lacking, requirement
from tools.on_device.steps import Outcome, Runner, Stage, Step, ask_where

SAYS = "from tools.on_device.steps import Result; r = Result(); r.add(figure=2.5); r.say('{}');"
HANGS = "print('begun', flush=True); import time; time.sleep(600)"
LONG_S = 60.0


def step(name: str, program: str, limit_s: float = LONG_S) -> Step:
    return Step(name=name, command=(sys.executable, "-c", program), limit_s=limit_s)


def stage(*steps: Step, at_once: int = 1, limit_s: float = 10 * LONG_S) -> Stage:
    return Stage(title="A stage", steps=steps, limit_s=limit_s, at_once=at_once)


def run(stages: Sequence[Stage], work: Path, limit_s: float = 10 * LONG_S) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(wheels.ROOT)}
    tell = lambda outcome: outcomes.update({outcome.name: outcome})
    Runner(work=work, environment=environment, limit_s=limit_s, tell=tell).run(stages, work)
    return outcomes


def test_a_step_that_fails_leaves_the_others(tmp_path: Path) -> None:
    broken = step("broken", SAYS.format("half way") + "raise ValueError('no such thing')")
    stages = [stage(broken), stage(step("well", SAYS.format("all well")))]
    outcomes = run(stages, tmp_path)
    assert outcomes["well"].state == "done"
    assert outcomes["well"].result == {"figure": 2.5, "said": "all well"}
    assert outcomes["broken"].state == "failed"
    assert outcomes["broken"].result["said"] == "half way"
    page = report(["a head"], stages, outcomes, wheels.ROOT)
    assert "| broken | failed |" in page
    assert "- It said: `ValueError: no such thing`" in page
    assert "### broken: it ended with 1" in page
    assert page.endswith("Everything was reached.\n")


def test_a_crash_and_a_program_that_is_not_there_are_told(tmp_path: Path) -> None:
    crash = step("crash", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    missing = Step(name="missing", command=("/no/such/program",), limit_s=LONG_S)
    outcomes = run([stage(crash, missing)], tmp_path)
    assert outcomes["crash"].how == "it ended by SIGKILL"
    assert outcomes["missing"].how.startswith("it could not be started: ")
    assert {each.state for each in outcomes.values()} == {"failed"}


@pytest.mark.ci
def test_a_step_that_hangs_is_killed_with_all_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "LAST_WORDS_S", 0.5)
    shell = "trap '' ABRT; sleep 600 & echo $! > pid; echo begun; wait"
    hangs = Step(name="hangs", command=("sh", "-c", shell), limit_s=4)
    outcomes = run([stage(hangs, step("after", "pass"))], tmp_path)
    assert outcomes["hangs"].state == "killed"
    assert outcomes["hangs"].how == "it was killed after 4 s, its limit"
    assert outcomes["hangs"].output == "begun\n"
    assert outcomes["after"].state == "done"
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_program_that_hangs_tells_where() -> None:
    hangs = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", HANGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with hangs:
        assert hangs.stdout is not None
        assert hangs.stdout.readline() == "begun\n"
        ask_where(hangs)
        output = hangs.stdout.read()
    assert "Fatal Python error: Aborted" in output
    assert 'File "<string>", line 1 in <module>' in output


def is_running(pid: int) -> bool:
    """Say whether a process is there and has not ended; one that nobody waits for is a zombie for a while."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_total_limit_cuts_the_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LEAST_S", 0.5)
    stages = [stage(step("hangs", HANGS), step("last", "pass")), stage(step("next", "pass"))]
    outcomes = run(stages, tmp_path, limit_s=1.5)
    assert {name: each.state for name, each in outcomes.items()} == {
        "hangs": "killed",
        "last": "not reached",
        "next": "not reached",
    }
    assert "what was left of the time" in outcomes["hangs"].how
    assert report([], stages, outcomes, wheels.ROOT).endswith("## Not reached\n\nlast, next\n")


def test_a_stage_that_takes_too_long_leaves_time_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "LEAST_S", 0.5)
    outcomes = run([stage(step("hangs", HANGS), limit_s=1), stage(step("next", "pass"))], tmp_path)
    assert [outcomes["hangs"].state, outcomes["next"].state] == ["killed", "done"]


def test_steps_of_a_stage_run_at_once_if_it_says_so(tmp_path: Path) -> None:
    """Each of two steps waits for the other's file."""
    program = "import pathlib, time; pathlib.Path('{0}').touch()\n"
    program += "while not pathlib.Path('{1}').exists(): time.sleep(0.01)"
    both = (step("one", program.format("one", "two")), step("two", program.format("two", "one")))
    outcomes = run([stage(*both, at_once=2)], tmp_path)
    assert [outcomes[name].state for name in ("one", "two")] == ["done", "done"]


def test_an_interrupted_run_kills_what_runs(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    begun = threading.Event()

    def interrupt() -> None:
        while not (told.exists() and told.read_text()):
            time.sleep(0.01)
        begun.set()
        os.kill(os.getpid(), signal.SIGINT)

    program = f"import os; open({str(told)!r}, 'w').write(str(os.getpid())); {HANGS}"
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run([stage(step("hangs", program), step("never", "pass"))], tmp_path)
    assert begun.is_set()
    assert not is_running(int(told.read_text()))


def test_the_report_is_there_after_each_step(tmp_path: Path) -> None:
    """Each step copies the report that it finds."""
    look = "import shutil; shutil.copy('report.md', '{}')"
    stages = [stage(step("one", look.format("seen1")), step("two", look.format("seen2")))]
    files = Files(tmp_path, ["a head"], stages)
    Runner(work=tmp_path, environment=os.environ, limit_s=LONG_S, tell=files.tell).run(stages, tmp_path)
    seen = [(tmp_path / name).read_text() for name in ("seen1", "seen2", "report.md")]
    assert [re.findall(r"^\| (one|two) \| (.*?) \|", text, re.MULTILINE) for text in seen] == [
        [("one", "not reached"), ("two", "not reached")],
        [("one", "done"), ("two", "not reached")],
        [("one", "done"), ("two", "done")],
    ]
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    assert "==== two: done" in (tmp_path / "output.log").read_text()


def test_figures_become_lists_and_tables() -> None:
    rows = [{"operation": "dot", "us": 1234.5}, {"operation": "a|b", "us": 2, "scope": "model"}]
    stages = [stage(step("few", ""), step("table", "")), stage(step("a", ""), step("b", ""))]
    outcomes = {
        "few": Outcome(name="few", state="done", result={"said": "well", "rate": 3.14159}),
        "table": Outcome(name="table", state="done", result={"operations": rows}),
        "a": Outcome(name="a", state="done", result={"compile s": 1.5}),
        "b": Outcome(name="b", state="done", result={"compile s": 2.5}),
    }
    page = report([], stages, outcomes, wheels.ROOT)
    assert "### few\n\n- rate: 3.142" in page
    assert "operations:\n\n| operation | us | scope |\n| --- | --- | --- |\n| dot | 1234 |  |\n" in page
    assert "| a\\|b | 2 | model |" in page
    assert "| step | compile s |\n| --- | --- |\n| a | 1.5 |\n| b | 2.5 |" in page


def test_the_place_in_our_files_is_found_among_others() -> None:
    root = Path("/checkout")
    trace = """Traceback (most recent call last):
  File "/checkout/tools/x.py", line 3, in <module>
  File "/checkout/runtime/penstock/runtime/engine.py", line 7, in start
  File "/checkout/.venv/lib/python3.12/site-packages/jax/api.py", line 9, in call
jaxlib.xla_client.XlaRuntimeError: INTERNAL: no kernel
"""
    assert why(trace, root) == (
        "jaxlib.xla_client.XlaRuntimeError: INTERNAL: no kernel",
        "runtime/penstock/runtime/engine.py:7, in start",
    )
    dump = """compiled 1 of 3
Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  File "/checkout/bench/other.py", line 1 in loop

Current thread 0x2 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 2 in wait
  File "/checkout/runtime/inner.py", line 3 in wait_for
  File "/checkout/tools/outer.py", line 4 in main
"""
    assert why(dump, root) == ("", "runtime/inner.py:3, in wait_for")
    assert why("", root) == ("", "")
    own = trace.replace(
        "jaxlib.xla_client.XlaRuntimeError: INTERNAL: no kernel", "ours.MalformedTrace: no JSON"
    )
    assert why(f"{own}\nlast words\n", root)[0] == "ours.MalformedTrace: no JSON"
    assert (
        why("E   AssertionError: assert 1 == 2\n1 failed\n", root)[0] == "E   AssertionError: assert 1 == 2"
    )


@pytest.mark.parametrize(
    ("version", "bounds", "is_within"),
    [
        ("0.12.8", ">=0.12,<0.13", True),
        ("0.12.8", ">=0.12.12", False),
        ("0.12.12", ">=0.12.12", True),
        ("1.86.0", ">=1.85.1,<1.86", False),
        ("2.11.0+cu130", ">=2.11,<3", True),
        ("1.0", "==1", True),
        ("0.17.6", "==0.17.*", True),
        ("0.170", "==0.17.*", False),
        ("2.4", "~=2.2", True),
        ("3.0", "~=2.2", False),
        ("1.4.9", "~=1.4.2", True),
        ("1.5.0", "~=1.4.2", False),
        ("1.2", "!=1.2.0", False),
        ("1.2", ">1.2", False),
        ("1.2", "<=1.2", True),
        ("1.2", "", True),
    ],
)
def test_bounds(version: str, bounds: str, is_within: bool) -> None:
    assert fits(version, bounds) is is_within


def test_most_goldens_are_taken_out_and_brought_back(tmp_path: Path) -> None:
    git = lambda *words: subprocess.run(
        ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words],
        check=True,
        capture_output=True,
    )
    files = [tmp_path / wheels.GOLDENS / name / "model" for name in ("qwen3", "opt", "lora/a")]
    files += [tmp_path / wheels.GOLDENS / "README.md", tmp_path / "model"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("weights")
    git("init")
    git("add", ".")
    git("commit", "--message", "all")
    files[1].write_text("changed")
    with pytest.raises(SystemExit, match="opt"):
        wheels.take_out(tmp_path, ["qwen3"])
    assert all(file.exists() for file in files)
    files[1].write_text("weights")
    for _ in range(2):  # the second time nothing is left to take out
        wheels.take_out(tmp_path, ["qwen3"])
        assert [file.exists() for file in files] == [True, False, False, True, True]
    git(*wheels.BRING_BACK.split()[1:])
    assert all(file.exists() for file in files)


def test_requirements_are_read_as_packages_write_them() -> None:
    assert requirement("Google_CRC32C >=1.7, <2") == Requirement("google-crc32c", ">=1.7, <2")
    assert requirement("jax[cuda13] (>=0.10) ; python_version < '4.0'") == Requirement("jax", ">=0.10")
    assert requirement("jax>=0.10 ; python_version >= '4.0'") is None
    assert requirement("pytest; extra == 'testing'") is None
    assert requirement("typing_extensions") == Requirement("typing-extensions", "")
    with pytest.raises(ValueError, match="no requirement"):
        requirement(">=1")


def wheel(name: str, version: str, *needs: str) -> Wheel:
    requirements = tuple(found for need in needs if (found := requirement(need)) is not None)
    return Wheel(f"{name}.whl", name, version, requirements)


CARRIED = (
    wheel("flax", "0.12.12", "jax>=0.8", "rich"),
    wheel("pydantic", "2.14", "pydantic-core==2.50"),
    wheel("pydantic-core", "2.50"),
    wheel("rich", "15"),
    wheel("jax", "0.11.2"),
)
WANTED = (
    Requirement("flax", ">=0.12"),
    Requirement("flax", ">=0.12.12"),
    Requirement("pydantic", ">=2.11,<3"),
    Requirement("jax", ">=0.10,<0.12"),
)


def chosen(installed: dict[str, str]) -> set[str]:
    return {each.name for each in choose(CARRIED, WANTED, installed)}


def test_missing_wheels_are_chosen_with_what_they_want() -> None:
    assert chosen({"jax": "0.11.2"}) == {"flax", "rich", "pydantic", "pydantic-core"}


def test_an_unfit_version_is_replaced_and_a_fit_one_stays() -> None:
    has = {"jax": "0.11.1", "flax": "0.12.8", "rich": "13", "pydantic": "2.12", "pydantic-core": "2.41"}
    assert chosen(has) == {"flax"}
    assert lacking(WANTED, has) == ("flax 0.12.8, and >=0.12.12 is wanted",)
    assert chosen({**has, "flax": "0.12.12"}) == set()


def test_what_a_new_version_pins_is_replaced_with_it() -> None:
    has = {"jax": "0.11.2", "flax": "0.12.12", "pydantic": "1.10", "pydantic-core": "2.41"}
    assert chosen(has) == {"pydantic", "pydantic-core"}


@pytest.mark.ci
def test_a_wheel_is_installed_where_it_is_missing(tmp_path: Path) -> None:
    """pip installs a wheel that is made here, into the folder alone, and the project's versions are known
    there.
    """
    name, info = "penstock_nonesuch-1.5-py3-none-any.whl", "penstock_nonesuch-1.5.dist-info"
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("penstock_nonesuch.py", "ANSWER = 42\n")
        headers = "Metadata-Version: 2.1\nName: penstock_nonesuch\nVersion: 1.5\nRequires-Dist: jax>=0.8\n"
        archive.writestr(f"{info}/METADATA", f"{headers}\nRequires-Dist: not-a-header\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (found,) = wheels.carried(tmp_path)
    assert (found.name, found.version, found.requirements) == (
        "penstock-nonesuch",
        "1.5",
        (Requirement("jax", ">=0.8"),),
    )
    site = tmp_path / "site"
    wanted = [Requirement("penstock-nonesuch", ">=1"), Requirement("penstock-lost", ">=2")]
    said = wheels.install([found], site, wanted=wanted, timeout_s=LONG_S)
    assert "installed penstock-nonesuch 1.5 (was missing)" in said
    assert "STILL LACKING: penstock-lost is missing, and >=2 is wanted" in said
    program = "import penstock_nonesuch as p, importlib.metadata as m; print(p.ANSWER, m.version('penstock'))"
    environment = wheels.environment(site, os.environ)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["42", metadata.version("penstock")]
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("penstock-nonesuch")
    (tmp_path / name).write_text("no wheel")
    with pytest.raises(wheels.InstallFailed, match=r"pip ended with 1: .*invalid"):
        wheels.install([found], site, wanted=wanted, timeout_s=LONG_S)


def test_what_is_wanted_is_what_the_projects_and_their_tests_want() -> None:
    names = {found.name for found in wheels.wanted()}
    assert {"flax", "jax", "grpcio", "uvicorn", "rich", *wheels.TESTERS} <= names
    assert not {"penstock", "penstock-client", "mypy", "ruff"} & names
    assert Requirement("flax", ">=0.12.12") in wheels.wanted()
    assert lacking([each for each in wheels.wanted() if each.name != "flax"], wheels.installed()) == ()


def test_the_plan_begins_with_what_is_worth_most(tmp_path: Path) -> None:
    assert len(plan.kinds()) > 10
    assert all((wheels.ROOT / "tests/golden" / kind / "expected.json").exists() for kind in plan.kinds())
    stages = plan.stages("cuda", python="python3", work=tmp_path, out=tmp_path)
    names = [step.name for stage in stages for step in stage.steps]
    assert len(set(names)) == len(names)
    firsts = [
        "facts",
        "checkpoint",
        *(f"golden-{kind}" for kind in plan.kinds()),
        "W1",
        "W2",
        "W3",
        "kernels-operation",
        "kernels-chunks",
        "kernels-experts",
        "kernels-tokens",
        "profile",
        "memory",
    ]
    assert names[: len(firsts)] == firsts
    limits = [stage.limit_s for stage in stages]
    assert 60 * plan.MINUTES - sum(limits[:2]) > 180, "whatever hangs before, W1 has time"
    longer = plan.stages("cuda", python="python3", work=tmp_path, out=tmp_path, minutes=2 * plan.MINUTES)
    assert [stage.limit_s for stage in longer] == [2 * limit_s for limit_s in limits]
    few = plan.stages("cpu", python="python3", work=tmp_path, out=tmp_path, only=["W1", "golden-qwen3"])
    assert [step.name for stage in few for step in stage.steps] == ["golden-qwen3", "golden-qwen3_5", "W1"]
    files = [wheels.ROOT / "tests/runtime/ops" / name for name in plan.OPERATION_TESTS]
    assert all(file.exists() for file in files)


def test_modules_of_steps_are_there(tmp_path: Path) -> None:
    for stage in plan.stages("cuda", python="python3", work=tmp_path, out=tmp_path):
        for each in stage.steps:
            module = each.command[2].replace(".", "/")
            assert each.command[2] == "pytest" or (wheels.ROOT / f"{module}.py").exists()


def test_the_run_needs_the_standard_library_alone(tmp_path: Path) -> None:
    program = "import tools.on_device.__main__, sys; print(*sorted(m.partition('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=wheels.ROOT, capture_output=True, text=True, check=True
    )
    others = set(done.stdout.split()) - set(sys.stdlib_module_names)
    assert others <= {"__main__", "tools", "__mp_main__"}


def event(name: str, us: float, pid: int = 1, tid: int = 1, **args: str) -> dict[str, object]:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": 0.0, "dur": us, "args": args}


def named(pid: int, process: str, tid: int, thread: str) -> list[dict[str, object]]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}},
    ]


def test_operations_of_a_gpus_streams_are_added_up() -> None:
    events = [
        *named(1, "/device:GPU:0", 1, "Stream #13(Compute)"),
        *named(1, "/device:GPU:0", 2, "XLA Ops"),
        *named(2, "/host:CPU", 1, "python"),
        event("gemm_fusion_dot_12", 5.0, hlo_module="jit_window_rows4_steps8", scope="model/mlp"),
        event("gemm_fusion_dot_7_1", 7.0, hlo_module="jit_window_rows4_steps8", scope="model/mlp"),
        event("loop_add_fusion", 20.0, hlo_module="jit_decode_rows4"),
        event("loop_add_fusion", 90.0, hlo_module="jit_forward_tokens16_rows4"),
        event("loop_add_fusion", 20.0, tid=2, hlo_module="jit_decode_rows4"),
        event("schedule", 50.0, pid=2),
    ]
    found = shares(of_decode_steps(device_events(events)))
    assert [(each.operation, each.scope, each.calls, each.us) for each in found] == [
        ("loop_add_fusion", "", 1, 20.0),
        ("gemm_fusion_dot", "model/mlp", 2, 12.0),
    ]


def test_operations_are_added_up_by_pieces_of_the_model() -> None:
    lines = [
        Share("dot", "model/mlp", 2, 5.0),
        Share("add", "", 1, 6.0),
        Share("dot", "model/mlp/gate", 1, 4.0),
    ]
    assert by_scope(lines) == [Share("all", "model/mlp", 3, 9.0), Share("all", "", 1, 6.0)]


def test_kernels_that_name_no_program_all_count() -> None:
    events = [*named(1, "/device:GPU:0", 1, "Stream #1"), event("a_kernel", 5.0), event("MemcpyD2H", 1.0)]
    assert len(of_decode_steps(device_events(events))) == 2


@pytest.mark.ci
def test_on_a_cpu_what_contains_operations_is_left_out() -> None:
    events = [
        *named(1, "/host:CPU", 1, "tf_XLAEigen"),
        event("while.3", 100.0, hlo_op="while.3", hlo_module="jit_window_rows4"),
        event("dot.1", 60.0, hlo_op="dot.1", hlo_module="jit_window_rows4"),
        event("wait", 500.0),
    ]
    assert [each.operation for each in shares(of_decode_steps(device_events(events)))] == ["dot"]
