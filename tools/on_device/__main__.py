"""Tries the engine on a machine that is lent for minutes and has no network, in one command.

    python -m tools.on_device pack                 # here: puts wheels into .whl, which travels along
    python3 -m tools.on_device run --out OUT       # there: installs what is missing, and writes OUT/report.md

`run` needs nothing but Python 3.12 at first. It installs into a folder of its own what the machine lacks, and
leaves its JAX alone. The report is written anew after each step, so whatever ends the run, the report is
there. OUT also gets results.jsonl (the figures of each step), output.log (what the steps printed) and traces.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from tools.on_device import plan, wheels
from tools.on_device.report import report
from tools.on_device.steps import PLATFORM, Outcome, Runner, Stage

_INSTALL_S = 90.0


class Files:
    """The files of the report, which are written anew with each outcome."""

    def __init__(self, out: Path, head: list[str], stages: list[Stage]) -> None:
        self._out, self._head, self._stages = out, head, stages
        self._outcomes: dict[str, Outcome] = {}
        self._began_s = time.monotonic()
        for name in ("results.jsonl", "output.log"):
            (out / name).write_text("", encoding="utf-8")
        self.write()

    def tell(self, outcome: Outcome) -> None:
        """Take in one outcome."""
        self._outcomes[outcome.name] = outcome
        facts = dataclasses.asdict(outcome)
        output = facts.pop("output")
        with (self._out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")
        with (self._out / "output.log").open("a", encoding="utf-8") as file:
            file.write(f"==== {outcome.name}: {outcome.state} after {outcome.seconds:.1f} s\n{output}\n")
        print(
            f"{outcome.name}: {outcome.state}, {outcome.seconds:.1f} s {outcome.result.get('said', '')}",
            flush=True,
        )
        self.write()

    def write(self) -> None:
        """Write the report, whole."""
        took = f"time taken: {time.monotonic() - self._began_s:.0f} s"
        text = report([*self._head, took], self._stages, self._outcomes, wheels.ROOT)
        part = self._out / "report.part"
        part.write_text(text, encoding="utf-8")
        part.replace(self._out / "report.md")


def run(args: argparse.Namespace) -> int:
    """Install and run; 0 if all steps were done."""
    until_s = time.monotonic() + 60 * args.minutes
    out, work = args.out.absolute(), Path(args.work or tempfile.mkdtemp(prefix="penstock-on-device-"))
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    platform = args.platform if args.platform != "auto" else found_platform()
    stages = plan.stages(
        platform, python=sys.executable, work=work.absolute(), out=out, only=args.only, minutes=args.minutes
    )
    if not stages:
        raise SystemExit(f"no step has a name that begins with {' or '.join(args.only)}")
    site = work / "site"
    head = [
        f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC, platform {platform}, Python {sys.version.split()[0]}",
        f"packages: {_installed(site)}",
        f"tests marked gpu: {', '.join(plan.marked()) or 'there are none'}",
    ]
    files = Files(out, head, stages)
    environment = wheels.environment(site.absolute(), os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu" if platform == "cpu" else f"{platform},cpu",
        PLATFORM: platform,
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }
    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        files.tell(outcome)

    runner = Runner(work=work, environment=environment, limit_s=until_s - time.monotonic(), tell=tell)
    runner.run(stages, wheels.ROOT)
    if args.work is None:
        shutil.rmtree(work, ignore_errors=True)
    print((out / "report.md").read_text(encoding="utf-8") if args.show else f"wrote {out / 'report.md'}")
    return 0 if all(outcome.state == "done" for outcome in outcomes) else 1


def _installed(site: Path) -> str:
    """Say what was installed, or why that failed; the steps are tried all the same."""
    try:
        return wheels.install(wheels.carried(), site, wanted=wheels.wanted(), timeout_s=_INSTALL_S)
    except (
        wheels.InstallFailed,
        zipfile.BadZipFile,
        OSError,
        ValueError,
        subprocess.TimeoutExpired,
    ) as error:
        return f"INSTALLING FAILED: {type(error).__name__}: {error}"


def found_platform() -> str:
    """Name the platform for which there is a plan: "cuda" where the machine has a driver of NVIDIA."""
    has_driver = shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()
    return "cuda" if has_driver else "cpu"


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.on_device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser(
        "pack", help="download the wheels that travel with the checkout; needs a network"
    )
    packing.add_argument(
        "--limit-mib", type=float, default=64, help="of wheels and checkout together; default: %(default)s"
    )
    running = verbs.add_parser("run", help="install what is missing, run all steps, and write the report")
    running.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="gets the report")
    running.add_argument(
        "--minutes", type=float, default=plan.MINUTES, help="of the whole run; default: %(default)s"
    )
    running.add_argument(
        "--platform", choices=("auto", *plan.SIZES), default="auto", help="default: %(default)s"
    )
    running.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,...",
        help="steps by the beginnings of names",
    )
    running.add_argument(
        "--work", metavar="FOLDER", help="for weights and compiled programs; default: a temporary one"
    )
    running.add_argument("--show", action="store_true", help="print the report at the end")
    args = parser.parse_args()
    if args.verb == "pack":
        print(wheels.pack(args.limit_mib, plan.kinds()))
        return 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGTERM, _interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        return run(args)
    return 130


if __name__ == "__main__":
    sys.exit(main())
