"""Compares two commits of Penstock on the same workloads, in turns.

    python -m bench.compare --against HEAD~1 --checkpoint bench/out/model --out bench/out/compare.jsonl

A machine's speed drifts by a fifth within an hour, so figures of two separate runs say little. Here both
engines are up at once, each in a process of its own, and take turns repeat by repeat. The two turns of a pair
follow each other directly, and only the ratios within pairs are judged. Both sides use the workloads, driver
and figures of this tree; the other commit must only run with the packages that are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.drivers import options
from bench.drivers.session import Driver, add_workload_arguments, chosen, one_repeat
from bench.drivers.side import Side
from bench.measures import record
from bench.measures.figures import label
from bench.workloads import TABLE, WARMUP, Workload

HERE, THERE = "here", "there"
"""This tree as it is, and the commit that it is compared with."""
TREE = Path(__file__).resolve().parent.parent
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "grpcio", "protobuf")


@dataclass(frozen=True, slots=True)
class Pair:
    """The figures of both sides in one round."""

    here: Mapping[str, float]
    there: Mapping[str, float]

    def speed_up(self, figure: str) -> float:
        """Tell how much faster this tree is than the other. Above 1 is better, for rates and for times."""
        ratio = self.here[figure] / self.there[figure]
        return ratio if figure.endswith("_per_s") else 1 / ratio


def take_turns(
    drivers: Mapping[str, Driver],
    workloads: Sequence[Workload],
    *,
    rounds: int,
    num_words: int,
    told: Callable[[Workload, int, str, Mapping[str, float]], None],
    say: Callable[[str], None] = print,
) -> dict[str, list[Pair]]:
    """Run the workloads and return the pairs of each, after one round that is not counted.

    The side that goes first changes with each round, so that a steady drift of the machine favours neither.
    `told` is called with workload, round, side and figures of each turn. A workload that fails on one side is
    reported and left out.
    """
    found: dict[str, list[Pair]] = {}
    for workload in workloads:
        pairs: list[Pair] = []
        side = ""
        try:
            for number in range(WARMUP, rounds):
                turns: dict[str, dict[str, float]] = {}
                for side in (HERE, THERE) if number % 2 else (THERE, HERE):
                    turns[side] = one_repeat(drivers[side], workload, number, num_words)
                if number == WARMUP:
                    continue
                for side, figures in turns.items():
                    told(workload, number, side, figures)
                pairs.append(Pair(turns[HERE], turns[THERE]))
                ratios = (
                    f"{name} {pairs[-1].speed_up(name):.3f}"
                    for name in workload.figures
                    if name in pairs[-1].here
                )
                say(f"{workload.name} round {number}: {', '.join(ratios)}")
        except ValueError as error:
            say(f"{workload.name} failed {side}: {error}")
            continue
        found[workload.name] = pairs
    return found


def table(found: Mapping[str, Sequence[Pair]], names: Mapping[str, str]) -> str:
    """Write a table in Markdown: for each figure that a workload is about, the medians of both sides, the
    speed-up of each pair, and the median of those. `names` are the commits by side.
    """
    rounds = max((len(pairs) for pairs in found.values()), default=0)
    head = [
        "workload",
        "figure",
        f"{names[THERE]} {THERE}",
        f"{names[HERE]} {HERE}",
        *map(str, range(1, rounds + 1)),
        "speed-up",
    ]
    lines = [f"| {' | '.join(head)} |", "|---|---|" + "---:|" * (rounds + 3)]
    for name, pairs in found.items():
        for figure in TABLE[name].figures:
            if not all(figure in side for pair in pairs for side in (pair.here, pair.there)):
                continue
            ratios = [pair.speed_up(figure) for pair in pairs]
            cells = [
                name,
                label(figure),
                f"{median(pair.there[figure] for pair in pairs):.4g}",
                f"{median(pair.here[figure] for pair in pairs):.4g}",
                *(f"{ratio:.3f}" for ratio in ratios),
                f"{median(ratios):.3f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def unpack(revision: str, folder: Path, repository: Path = TREE) -> str:
    """Write the files of a git revision into an empty folder, and return the short commit. Raises ValueError
    if git does not know the revision.

    It uses an archive and not a worktree, so that a run that is killed leaves nothing behind in the
    repository.
    """
    try:
        commit = _git(repository, "rev-parse", "--short=12", f"{revision}^{{commit}}").decode().strip()
    except subprocess.CalledProcessError as error:
        raise ValueError(f"--against {revision}: git knows no such commit") from error
    archive = folder / "tree.tar"
    _git(repository, "archive", "--format=tar", f"--output={archive}", commit)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()
    return commit


def _git(repository: Path, *args: str) -> bytes:
    return subprocess.run(["git", "-C", str(repository), *args], check=True, capture_output=True).stdout


def import_path(tree: Path) -> str:
    """Return a PYTHONPATH with which `penstock` comes from `tree`, whatever is installed, and `bench` from
    here.
    """
    build = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    return os.pathsep.join(str(root) for root in (*(tree / name for name in build["dev-mode-dirs"]), TREE))


def start(tree: Path, side: str, given: Mapping[str, Any], args: argparse.Namespace) -> Side:
    """Start the engine of `tree` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "bench.drivers.side_process",
        "--checkpoint",
        args.checkpoint,
        "--mode",
        args.mode,
    ]
    command += ["--options", json.dumps(given), "--log", str(args.log.with_suffix(f".{side}.log"))]
    driver = Side(command, {**os.environ, "PYTHONPATH": import_path(tree)})
    try:
        driver.wait_until_up()
    except RuntimeError:
        driver.close()
        raise
    return driver


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__.split("\n")[0])
    add_workload_arguments(parser)
    parser.add_argument("--against", required=True, metavar="REV", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="after one warm-up; default: 3")
    parser.add_argument("--mode", choices=("inprocess", "grpc"), default="inprocess")
    for flag, whose in (("--set", "both sides"), ("--set-here", "this tree"), ("--set-there", "the other")):
        parser.add_argument(
            flag, action="append", default=[], metavar="NAME=VALUE", help=f"an engine option of {whose}"
        )
    parser.add_argument(
        "--log",
        type=Path,
        default=Path("bench/out/compare.log"),
        metavar="FILE",
        help="the servers' log, with the side's name before the ending; default: %(default)s",
    )
    return parser


def engine_options(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Read the options of each side: bench's defaults, overridden by those of both sides, then by its own.
    Raises ValueError for an option without "=".
    """
    both = {**options.DEFAULTS, **options.parse(args.set)}
    return {HERE: both | options.parse(args.set_here), THERE: both | options.parse(args.set_there)}


def main() -> int:
    args = arguments().parse_args()
    try:
        workloads, given = chosen(args), engine_options(args)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-compare-")))
            names = {HERE: record.commit() or HERE, THERE: unpack(args.against, folder)}
            drivers: dict[str, Side] = {}
            for side, tree in ((THERE, folder), (HERE, TREE)):
                drivers[side] = start(tree, side, given[side], args)
                stack.callback(drivers[side].close)
            about = {
                side: {
                    "engine": f"{names[side]} {side}",
                    "commit": names[side],
                    "options": given[side],
                    "startup": drivers[side].startup,
                    "machine": record.machine(),
                    "versions": record.versions(_PACKAGES),
                }
                for side in drivers
            }

            def told(workload: Workload, number: int, side: str, figures: Mapping[str, float]) -> None:
                if args.out is not None:
                    line = {
                        "workload": workload.name,
                        "title": workload.title,
                        "repeat": number,
                        "side": side,
                    }
                    more = dict(drivers[side].about_repeat())
                    record.write_line(args.out, line | {"figures": figures} | more | about[side])

            found = take_turns(drivers, workloads, rounds=args.rounds, num_words=args.num_words, told=told)
    except (ValueError, RuntimeError) as error:
        print(f"bench.compare: {error}", file=sys.stderr)
        return 1
    print(f"\n{table(found, names)}")
    return 0 if len(found) == len(workloads) else 1


if __name__ == "__main__":
    sys.exit(main())
