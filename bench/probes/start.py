"""Measures a start of `penstock serve`: seconds until it is ready, processor seconds, and memory, by phase.

    python -m bench.probes.start --checkpoint bench/out/model --against HEAD~1

The servers of this tree and of the other commit start in turns, after a start of each that fills the folder
of compiled programs. Processor seconds are those of all processes of a server. On a machine that does
other things they say more than seconds until ready.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.compare import HERE, THERE, TREE, import_path, unpack
from bench.measures.record import children

PHASES = (
    ("imports, config, tokenizer", "loading "),
    ("weights", "KV cache: "),
    ("cache and state", "compiled programs are kept in"),
    ("programs", "penstock: ready on"),
)
"""Each phase, and what the line has that ends it."""
_MIB = 2**20
_SETTLE_S = 3.0
"""Seconds after the start until memory is measured, as a server that nobody calls has it."""
_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a start."""

    seconds: float
    cpu_s: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Start:
    """What was measured of one start."""

    marks: tuple[Mark, ...]
    """The ends of `PHASES`."""
    processes: int
    resident_bytes: int
    """Of all processes, some seconds later."""


def processes(pid: int) -> list[int]:
    return [pid, *children(pid)]


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process and its descendants, those that have ended included."""
    ticks = 0
    for each in processes(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Measure the memory of a process and its descendants; what several share counts in parts."""
    total = 0
    for each in processes(pid):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


@contextlib.contextmanager
def server(tree: Path, flags: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a server of a tree, whose output and log come in one pipe."""
    # The start before the first round writes the tree's bytecode, which an installed package has.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock.cli", "serve", *flags, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**own, "PYTHONPATH": import_path(tree)},
    )
    timer = threading.Timer(_LIMIT_S, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.send_signal(signal.SIGTERM)
        process.communicate()


def measure(tree: Path, flags: Sequence[str]) -> Start:
    """Start a server, and end it. Raises RuntimeError if it does not become ready."""
    began, marks, said = time.monotonic(), list[Mark](), ""
    with server(tree, flags) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if PHASES[len(marks)][1] in line:
                spent = time.monotonic() - began
                marks.append(Mark(spent, cpu_s(process.pid), resident_bytes(process.pid)))
                if len(marks) == len(PHASES):
                    break
        else:
            raise RuntimeError(f"the server of {tree} did not become ready:\n{said}")
        time.sleep(_SETTLE_S)
        return Start(tuple(marks), len(processes(process.pid)), resident_bytes(process.pid))


def table(found: dict[str, list[Start]], names: dict[str, str]) -> str:
    """Write the medians of each side, by phase, in Markdown."""
    lines = ["| | phase | s | processor s | MiB at its end |", "|---|---|---:|---:|---:|"]
    for side, starts in found.items():
        before = [Mark(0.0, 0.0, 0)] * len(starts)
        for i, (phase, _) in enumerate(PHASES):
            now = [start.marks[i] for start in starts]
            spent = [(b.seconds - a.seconds, b.cpu_s - a.cpu_s) for a, b in zip(before, now, strict=True)]
            cells = (
                f"{median(s for s, _ in spent):.2f}",
                f"{median(s for _, s in spent):.2f}",
                f"{median(mark.resident_bytes for mark in now) / _MIB:,.0f}",
            )
            lines.append(f"| {names[side]} | {phase} | {' | '.join(cells)} |")
            before = now
        ready = [start.marks[-1] for start in starts]
        settled = median(start.resident_bytes for start in starts) / _MIB
        lines.append(
            f"| {names[side]} | **until ready; {_SETTLE_S:g} s later in {max(s.processes for s in starts)} "
            f"process(es)** | {median(mark.seconds for mark in ready):.2f} "
            f"| {median(mark.cpu_s for mark in ready):.2f} | {settled:,.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.probes.start", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", default="demo", metavar="MODEL", help="default: %(default)s")
    parser.add_argument("--against", metavar="REV", help="a commit whose servers start in turns with these")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("flags", nargs="*", help="further flags of penstock serve, after --")
    args = parser.parse_args()
    with ExitStack() as stack:
        programs = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-start-"))
        trees, names = {HERE: TREE}, {HERE: HERE}
        if args.against is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-start-")))
            trees, names = {THERE: folder, **trees}, {THERE: unpack(args.against, folder), **names}
        found: dict[str, list[Start]] = {side: [] for side in trees}
        for number in range(-1, args.rounds):
            for side, tree in trees.items():
                kept = str(Path(programs) / side)  # of its own, so that each side compiles all that it keeps
                start = measure(tree, [args.checkpoint, "--compilation-cache", kept, *args.flags])
                if number >= 0:
                    found[side].append(start)
        print(table(found, names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
