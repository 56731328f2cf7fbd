"""Runs clang-tidy over the C++ kernels, each file with the flags that it is compiled with.

    python -m tools.clang_tidy

The checks are listed in `.clang-tidy` beside the sources. Any finding fails the run. It takes about a minute.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.ffi

from penstock.runtime.machine.processors import available_processors
from penstock.runtime.ops.native.build import KERNELS, SOURCES


def findings(tool: str, source: Path) -> str:
    """Return what clang-tidy reports of one file; "" if there is nothing."""
    flags = [*KERNELS.flags_of(source), "-std=c++17", f"-I{SOURCES}", "-isystem", jax.ffi.include_dir()]
    command = [tool, "--quiet", "--warnings-as-errors=*", str(source), "--", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def main() -> int:
    tool = shutil.which("clang-tidy") or str(Path(sys.executable).parent / "clang-tidy")
    with ThreadPoolExecutor(available_processors()) as pool:
        reports = list(pool.map(lambda source: findings(tool, source), KERNELS.sources))
    sys.stdout.write("".join(reports))
    return 1 if any(reports) else 0


if __name__ == "__main__":
    sys.exit(main())
