"""Builds the wheels and the sdists of both distributions: `python -m tools.wheels --out dist`.

penstock's wheel is built from its sdist, with the native library inside. auditwheel then looks which versions
of glibc the library runs with, and names them in the wheel's tag.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build_client(out: Path) -> Path:
    """Build penstock-client's sdist, and from it the wheel, into the folder `out`; the path of the wheel."""
    _build(ROOT / "clients" / "python", out)
    (wheel,) = out.glob("penstock_client-*.whl")
    return wheel


def build_engine(out: Path) -> Path:
    """Build penstock's sdist, and from it the wheel, into the folder `out`; the path of the wheel.

    It exits with a message if the native library could not be compiled.
    """
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch)
        _build(ROOT, built)
        (wheel,) = built.glob("penstock-*.whl")
        if wheel.stem.endswith("-any"):
            raise SystemExit("the native library was not compiled, see above; it needs g++ on x86-64 Linux")
        auditwheel = str(Path(sys.executable).with_name("auditwheel"))
        subprocess.run([auditwheel, "repair", "--wheel-dir", str(out), str(wheel)], check=True)
        (sdist,) = built.glob("penstock-*.tar.gz")
        shutil.copy(sdist, out)
    (wheel,) = out.glob("penstock-*.whl")
    return wheel


def _build(project: Path, out: Path) -> None:
    # Without isolation: hatchling and JAX are here, in the versions that constraints.txt pins.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(project)]
    subprocess.run(command, check=True)


def main() -> None:
    """Build all four files anew."""
    parser = argparse.ArgumentParser(description="Build the wheels and sdists of both distributions.")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="default: %(default)s")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("penstock[-_]*"):
        old.unlink()
    build_client(out)
    build_engine(out)
    for file in sorted(out.glob("penstock[-_]*")):
        print(file)


if __name__ == "__main__":
    main()
