"""Comparing two commits in turns: order, pairs and ratios worked out by hand, and running another commit's
sources.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench import compare
from bench.compare import HERE, THERE, TREE, Pair, engine_options, import_path, table, take_turns, unpack
from bench.workloads import TABLE, Wave, shrunk
from penstock.cli.measuring.stats import RequestTrace

W2, W3 = (shrunk(TABLE[name], 64) for name in ("W2", "W3"))


class Clockwork:
    """Takes `seconds` for all tokens of a wave, and `drift` more with each wave that either side has run."""

    def __init__(self, name, seconds, waves, drift=0.0):
        self.name, self.seconds, self.waves, self.drift = name, seconds, waves, drift

    def run_wave(self, jobs):
        self.waves.append((self.name, jobs))
        end = self.seconds + self.drift * len(self.waves)
        return [RequestTrace(0.0, ((end, job.max_tokens),), end, len(job.token_ids)) for job in jobs]

    def about_repeat(self):
        return {}


def run(drivers, workloads=(W2,), rounds=2):
    told: list[tuple[str, int, str]] = []
    said: list[str] = []
    found = take_turns(
        drivers,
        workloads,
        rounds=rounds,
        num_words=100,
        told=lambda workload, number, side, figures: told.append((workload.name, number, side)),
        say=said.append,
    )
    return found, told, said


def test_turns():
    waves: list[tuple[str, Wave]] = []
    found, told, said = run({HERE: Clockwork("h", 2.0, waves), THERE: Clockwork("t", 3.0, waves)})
    # One round that does not count, then two that do. The side that was second goes first the next time.
    assert [name for name, _ in waves] == ["h", "t", "t", "h", "h", "t"]
    assert all(waves[i][1] == waves[i + 1][1] for i in (0, 2, 4)), "a pair has the same tokens"
    assert waves[0][1] != waves[2][1] != waves[4][1]
    assert told == [("W2", 0, THERE), ("W2", 0, HERE), ("W2", 1, HERE), ("W2", 1, THERE)]
    assert [pair.speed_up("output_tokens_per_s") for pair in found["W2"]] == pytest.approx([1.5, 1.5])
    assert said[0] == "W2 round 0: output_tokens_per_s 1.500"


def test_a_steady_drift_favours_neither():
    waves: list[tuple[str, Wave]] = []
    drivers = {HERE: Clockwork("h", 1.0, waves, 0.1), THERE: Clockwork("t", 1.0, waves, 0.1)}
    ratios = [pair.speed_up("output_tokens_per_s") for pair in run(drivers)[0]["W2"]]
    # Waves 3 to 6 count: first 1.3 s there and 1.4 s here, then 1.5 s here and 1.6 s there.
    assert ratios == pytest.approx([1.3 / 1.4, 1.6 / 1.5])


def test_a_workload_that_fails_is_left_out():
    waves: list[tuple[str, Wave]] = []

    class Failing(Clockwork):
        def run_wave(self, jobs):
            if len(jobs) == 16:
                raise ValueError("out of pages")
            return super().run_wave(jobs)

    found, _, said = run({HERE: Clockwork("h", 2.0, waves), THERE: Failing("t", 2.0, waves)}, (W2, W3))
    assert list(found) == ["W3"]
    assert said[0] == "W2 failed there: out of pages"


def test_speed_up_is_above_one_where_this_tree_is_faster():
    pair = Pair(
        here={"output_tokens_per_s": 30.0, "wave1_s": 2.0},
        there={"output_tokens_per_s": 20.0, "wave1_s": 5.0},
    )
    assert (pair.speed_up("output_tokens_per_s"), pair.speed_up("wave1_s")) == (1.5, 2.5)


def test_table():
    found = {
        "W2": [
            Pair({"output_tokens_per_s": here}, {"output_tokens_per_s": 100.0})
            for here in (90.0, 120.0, 110.0)
        ],
        "W4": [Pair({"wave1_s": 2.0, "wave2_s": 1.0}, {"wave1_s": 3.0})] * 3,  # one side lacks a figure
    }
    assert table(found, {HERE: "aaa+", THERE: "bbb"}).splitlines() == [
        "| workload | figure | bbb there | aaa+ here | 1 | 2 | 3 | speed-up |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        "| W2 | output, tok/s | 100 | 110 | 0.900 | 1.200 | 1.100 | 1.100 |",
        "| W4 | wave1, s | 3 | 2 | 1.500 | 1.500 | 1.500 | 1.500 |",
    ]


def test_options_of_one_side():
    args = ["--against", "x", "--checkpoint", "y", "--set", "page_size=32", "--set-here", "max_num_seqs=4"]
    given = engine_options(compare.arguments().parse_args(args))
    assert (given[HERE]["max_num_seqs"], given[THERE]["max_num_seqs"]) == (4, 32)
    assert given[HERE]["page_size"] == given[THERE]["page_size"] == 32


def test_another_commit_is_what_runs(tmp_path):
    """In a repository made here: its `penstock` takes precedence over the installed one, and
    `bench` is ours.
    """

    # Without settings of the user or the machine, which might sign commits or run hooks.
    env = os.environ | dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull)

    def git(*args):
        subprocess.run(["git", "-C", str(repository), *args], check=True, capture_output=True, env=env)

    repository, folder = tmp_path / "repository", tmp_path / "unpacked"
    package = repository / "roots" / "penstock" / "runtime"
    package.mkdir(parents=True)
    folder.mkdir()
    (repository / "pyproject.toml").write_text('[tool.hatch.build]\ndev-mode-dirs = ["roots"]\n')
    (package / "__init__.py").write_text("OLD = True\n")
    git("init", "--quiet")
    git("add", ".")
    git("-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message", "one")
    (package / "__init__.py").write_text("OLD = False\n")

    commit = unpack("HEAD", folder, repository)
    assert len(commit) == 12
    assert sorted(file.name for file in folder.iterdir()) == ["pyproject.toml", "roots"]
    code = "import bench, penstock.runtime as r; print(r.OLD, bench.__path__[0])"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": import_path(folder)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["True", str(TREE / "bench")]
    with pytest.raises(ValueError, match="no such commit"):
        unpack("no-such-revision", folder, repository)
