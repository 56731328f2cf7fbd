"""Measures another engine: installs it if needed, then runs its module in its environment.

python -m bench.rivals vllm --home DIR --checkpoint DIR --out bench/out/vllm.jsonl --workloads main
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.rivals.environments import RIVALS, Rival, install_commands, variables

ROOT = Path(__file__).resolve().parents[2]
_DONE = "installed"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rivals", description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=RIVALS)
    parser.add_argument(
        "--home",
        type=Path,
        default=Path("~/.cache/penstock/rivals").expanduser(),
        metavar="DIR",
        help="where environments are kept, some GB each; default: %(default)s",
    )
    parser.add_argument("--install-only", action="store_true")
    args, rest = parser.parse_known_args()
    rival = RIVALS[args.name]
    folder: Path = args.home.resolve() / args.name
    if not (folder / _DONE).exists():
        install(rival, folder)
    if args.install_only:
        return 0
    # Only those of Penstock's sources that need nothing installed: bench/ itself, and the statistics.
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'clients' / 'python'}", "HF_HUB_OFFLINE": "1"}
    command = [str(folder / "bin" / "python"), "-m", f"bench.rivals.{rival.module}", *rest]
    return subprocess.run(command, check=False, env=variables(rival, str(folder), environment)).returncode


def install(rival: Rival, folder: Path) -> None:
    """Make the environment. Raises CalledProcessError if that fails; the next run then tries again."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    overrides = folder.parent / f"{folder.name}-overrides.txt"
    overrides.write_text("\n".join(rival.overrides) + "\n")
    shutil.rmtree(folder, ignore_errors=True)  # what a failed attempt left
    environment = {"UV_CACHE_DIR": str(folder.parent / ".uv-cache")} | os.environ
    for command in install_commands(rival, uv, str(folder), str(overrides)):
        subprocess.run(command, check=True, env=environment)
    (folder / _DONE).touch()


if __name__ == "__main__":
    sys.exit(main())
