"""Runs the commands of the README of a client in another language, as its readers do, from top to bottom.

They run in a copy of the client's folder, beside what else of the repository they read, and
`penstock serve` starts real servers of the demo model (tests/docs/programs.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.docs import programs
from tests.docs.pages import ROOT, blocks
from tests.docs.shell import commands
from tests.support.prometheus import free_port

READMES = (ROOT / "clients" / "go", ROOT / "clients" / "java")
"""The folders of such clients."""
LIMIT_S = 900


def run_readme(client: Path, folder: Path, *, left_out: Sequence[str], ignored: Sequence[str] = ()) -> str:
    """Run the commands of client/README.md in `folder`, an empty one, and return what they printed.

    Commands that begin with one of `left_out`, each of which must be there, are not run. `ignored` are
    patterns of files that are not copied.
    """
    page = client / "README.md"
    script = ["set -euo pipefail"]
    unused = set(left_out)
    for block in blocks():
        if block.page != page or block.language != "sh":
            continue
        script.append(f"echo '== {block.name}'")
        for command in commands(block.source):
            beginning = next((words for words in left_out if command.startswith(words)), None)
            if beginning is None:
                script.append(command)
            unused.discard(beginning or "")
    assert len(script) > 1, f"{page} has no commands"
    assert not unused, f"{page} has no such commands"
    root = folder / "penstock"
    shutil.copytree(client, root / client.relative_to(ROOT), ignore=shutil.ignore_patterns(*ignored))
    (root / "runtime").symlink_to(ROOT / "runtime")
    # Copied, because Maven's plugin for protobuf follows no links.
    shutil.copytree(ROOT / "protos", root / "protos", ignore=shutil.ignore_patterns("*.py*", "__pycache__"))
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    penstock = bin_folder / "penstock"
    penstock.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.docs.programs penstock "$@"\n')
    penstock.chmod(0o755)
    port = str(free_port())
    try:
        done = subprocess.run(
            ["bash", "-c", "\n".join(script).replace("50051", port)],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            env={
                **os.environ,
                "PATH": f"{bin_folder}:{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
                "PENSTOCK_ADDR": f"127.0.0.1:{port}",
                "PAGE_PORT": port,
                "PAGE_ENGINE": "demo",
                "PAGE_FOLDER": str(folder),
            },
            check=False,
        )
    finally:
        programs.stop_server(folder)
    assert done.returncode == 0, done.stdout
    return done.stdout
