"""Wheels that travel with the checkout: which are packed here, and how they are installed there.

`pack` needs a network and the environment of `make install`. Everything else here needs the standard library
and pip, and is called on the machine that has no network.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

from tools.on_device.requirements import Requirement, Wheel, canonical, choose, lacking, requirement

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".whl"
"""Where packed wheels lie. Git ignores the folder."""
SOURCES = ("protos", "service", "runtime", "clients/python", ".")
"""The source roots, which are used as they lie there: a wheel of the project would be of another commit."""
TESTERS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")
"""What tests/support and the tests themselves import, of the extra `dev`."""
BESIDE_JAX = ("flax>=0.12.12",)
"""Bounds beside those of pyproject.toml: an older flax cannot be imported beside JAX 0.11."""
LEFT_THERE = frozenset(
    {"jax", "jaxlib", "numpy", "scipy", "ml-dtypes", "opt-einsum", "optax", "orbax-checkpoint", "tensorstore"}
    | {"transformers", "tokenizers", "safetensors", "huggingface-hub", "hf-xet", "regex", "uvloop"}
    | {"pygments", "pyyaml", "psutil", "msgpack"}
)
"""What is not packed. The machine has its own JAX, with CUDA; the others are large, and every machine with
JAX, flax and transformers has them or does without.
"""
GOLDENS = "tests/golden"
BRING_BACK = f"git restore --staged --worktree {GOLDENS}"
_TARGET_PYTHON = "3.12"
_TARGET_JAX = "jax==0.11.2"
_TARGET_GLIBC = 36
"""The minor version. pip takes each of the older ones only where it is named."""
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(_TARGET_GLIBC, 16, -1)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)
_MIB = 1 << 20


class InstallFailed(Exception):
    """pip could not install the wheels."""


def wanted_lines() -> list[str]:
    """List the requirements of both distributions, of what tests import, and BESIDE_JAX, as text."""
    projects = [
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in (".", "clients/python")
    ]
    ours = {canonical(project["name"]) for project in projects}
    lines = [line for project in projects for line in project["dependencies"] if _name(line) not in ours]
    tests = [line for line in projects[0]["optional-dependencies"]["dev"] if _name(line) in TESTERS]
    return [*lines, *tests, *BESIDE_JAX]


def _name(line: str) -> str:
    found = requirement(line)
    return "" if found is None else found.name


def wanted() -> list[Requirement]:
    """Return the same, read."""
    return [found for line in wanted_lines() if (found := requirement(line)) is not None]


def pack(limit_mib: float, needed: Iterable[str]) -> str:
    """Download into FOLDER the wheels that the target machine may lack, take all goldens but those in
    `needed` out of the checkout, and say how large all is that travels. It exits with a message if that is
    more than `limit_mib`, or if git sees changes in what it would take out.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    pins = FOLDER / "pins.txt"
    uv = Path(sys.executable).with_name("uv")
    resolve = [str(uv), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:"]
    resolve += ["--python-version", _TARGET_PYTHON, "--python-platform"]
    resolve += [f"x86_64-manylinux_2_{_TARGET_GLIBC}", "-"]
    lines = "\n".join([*wanted_lines(), _TARGET_JAX])
    done = subprocess.run(resolve, input=lines, stdout=subprocess.PIPE, text=True, check=True)
    chosen = [line for line in done.stdout.splitlines() if line and _name(line) not in LEFT_THERE]
    pins.write_text("\n".join(chosen) + "\n", encoding="utf-8")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    download += ["--implementation", "cp", "--python-version", _TARGET_PYTHON, "--dest", str(FOLDER)]
    download += [f"--platform={platform}" for platform in _PLATFORMS]
    subprocess.run([*download, "--requirement", str(pins)], check=True)
    take_out(ROOT, needed)
    wheels, tree = sum(map(_size, FOLDER.iterdir())), _tree_bytes()
    said = (
        f"{len(chosen)} wheels of {wheels / _MIB:.1f} MiB in {FOLDER}, and a tree of {tree / _MIB:.1f} MiB. "
        f"Most goldens are out of the checkout until you say: {BRING_BACK}"
    )
    if wheels + tree > limit_mib * _MIB:
        raise SystemExit(
            f"{said}\nThis is more than {limit_mib:g} MiB: name more in LEFT_THERE of {__file__}"
        )
    return said


def take_out(checkout: Path, needed: Iterable[str]) -> None:
    """Take the goldens that `needed` does not name out of a checkout and of git's index, because all of them
    are more than may travel. BRING_BACK undoes it. SystemExit, and nothing is taken out, if any golden has
    changes, which BRING_BACK would lose.
    """
    told = _git(checkout, "status", "--porcelain", "--untracked-files=no", "--", GOLDENS).splitlines()
    if changed := [line for line in told if not line.startswith("D ")]:
        raise SystemExit(f"commit these changes first, or undo them: {' '.join(changed)}")
    tracked = _git(checkout, "ls-files", "-z", "--", GOLDENS).split("\0")
    folders = {"/".join(name.split("/")[:3]) for name in tracked if name.count("/") > 2}
    if out := sorted(folders - {f"{GOLDENS}/{name}" for name in needed}):
        _git(checkout, "rm", "-r", "--quiet", "--", *out)


def _git(checkout: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(checkout), *words], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def _tree_bytes() -> int:
    """Count the bytes of all files of the checkout that git tracks, or would track."""
    names = _git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    return sum(_size(ROOT / name) for name in set(names) if name)


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def carried(folder: Path = FOLDER) -> tuple[Wheel, ...]:
    """List the wheels in a folder; none if there is no folder."""
    return tuple(map(read_wheel, sorted(folder.glob("*.whl"))))


def read_wheel(file: Path) -> Wheel:
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode())
    found = map(requirement, headers.get_all("Requires-Dist", []))
    requirements = tuple(each for each in found if each is not None)
    return Wheel(str(file), canonical(headers["Name"]), headers["Version"], requirements)


def installed() -> dict[str, str]:
    """Return the versions of what this Python has, by canonical names. What comes first on the path
    counts.
    """
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(canonical(name), distribution.version)
    return found


def install(wheels: Iterable[Wheel], site: Path, *, wanted: Sequence[Requirement], timeout_s: float) -> str:
    """Install into the folder `site` what this Python lacks, and tell what that was and what is still
    lacking. Nothing outside the folder changes. Raises subprocess.SubprocessError if pip fails or takes too
    long.
    """
    have = installed()
    chosen = choose(wheels, wanted, have)
    name_the_project(site)
    if chosen:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
        ]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--upgrade", "--target", str(site)]
        command += [wheel.file for wheel in chosen]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        if done.returncode:
            raise InstallFailed(f"pip ended with {done.returncode}: {done.stderr.strip()}")
    now = have | {wheel.name: wheel.version for wheel in chosen}
    added = ", ".join(f"{each.name} {each.version} (was {have.get(each.name, 'missing')})" for each in chosen)
    still = "; ".join(lacking(wanted, now))
    return f"installed {added or 'nothing'}. {f'STILL LACKING: {still}' if still else 'Nothing is lacking.'}"


def name_the_project(site: Path) -> None:
    """Let importlib.metadata know the versions of both distributions, whose sources are used where they
    lie.
    """
    for folder in (".", "clients/python"):
        text = (ROOT / folder / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text)["project"]
        name, version = project["name"], project["version"]
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def environment(site: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables under which Python finds what was installed, and the project's sources."""
    folders = [str(site), *(str(ROOT / source) for source in SOURCES)]
    return {**base, "PYTHONPATH": ":".join([*folders, *filter(None, [base.get("PYTHONPATH")])])}
