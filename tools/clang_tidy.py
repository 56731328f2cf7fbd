"""Runs clang-tidy over the C++ kernels, each file with the flags that it is compiled with.

    python -m tools.clang_tidy [--since REVISION]

The checks are listed in `.clang-tidy` beside the sources. Any finding fails the run. It takes about a minute.
With --since it reads only the files of which it may find something else than at that commit.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.ffi

from penstock.runtime.machine.processors import available_processors
from penstock.runtime.ops.native.build import KERNELS, SOURCES

ROOT = Path(__file__).parents[1]
FOR_ALL = (
    "constraints.txt",
    "pyproject.toml",
    "tools/clang_tidy.py",
    "runtime/penstock/runtime/ops/native/build.py",
)
"""What decides of all files what is found: the versions of clang-tidy and of XLA's headers, and the flags."""


def findings(tool: str, source: Path) -> str:
    """Return what clang-tidy reports of one file; "" if there is nothing."""
    flags = [*KERNELS.flags_of(source), "-std=c++17", f"-I{SOURCES}", "-isystem", jax.ffi.include_dir()]
    command = [tool, "--quiet", "--warnings-as-errors=*", str(source), "--", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def concerned(changed: Collection[str]) -> Sequence[Path]:
    """Return the sources of which clang-tidy may find something else after these files have changed. Any
    source may read any header. `changed`: paths below the repository's root.
    """
    files = {ROOT / name for name in changed}
    if any(file.is_relative_to(SOURCES) and file.suffix != ".cc" for file in files):
        return KERNELS.sources
    if not files.isdisjoint(ROOT / name for name in FOR_ALL):
        return KERNELS.sources
    return [source for source in KERNELS.sources if source in files]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Run clang-tidy over the C++ kernels.")
    parser.add_argument(
        "--since", metavar="REVISION", help="read only what may have changed since this commit"
    )
    since = parser.parse_args(arguments).since
    sources: Sequence[Path] = KERNELS.sources
    if since is not None:
        command = ["git", "diff", "--name-only", since]
        sources = concerned(subprocess.check_output(command, cwd=ROOT, text=True).splitlines())
    tool = shutil.which("clang-tidy") or str(Path(sys.executable).parent / "clang-tidy")
    with ThreadPoolExecutor(available_processors()) as pool:
        reports = list(pool.map(lambda source: findings(tool, source), sources))
    sys.stdout.write("".join(reports))
    return 1 if any(reports) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
