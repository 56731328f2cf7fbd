"""The import law at run time: what a module loads, also through the packages above it.

import-linter reads import statements and never looks at what importing `penstock.runtime` itself brings in.
"""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
DISTRIBUTIONS = [REPOSITORY, REPOSITORY / "clients" / "python"]
PYPROJECTS: list[dict[str, Any]] = [
    tomllib.loads((folder / "pyproject.toml").read_text()) for folder in DISTRIBUTIONS
]
PYPROJECT = PYPROJECTS[0]
ROOTS = [
    (folder / root).resolve()
    for folder, project in zip(DISTRIBUTIONS, PYPROJECTS, strict=True)
    for root in project["tool"]["hatch"]["build"]["dev-mode-dirs"]
]
LAW = PYPROJECT["tool"]["importlinter"]
SOURCES = {law["id"]: law.get("source_modules", []) for law in LAW["contracts"]}


def modules_of(name: str) -> list[str]:
    """Every module in the package `name`, or `name` itself where it is a module."""
    files = [
        file.relative_to(root) for root in ROOTS for file in (root / name.replace(".", "/")).rglob("*.py")
    ]
    return [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files] or [name]


def loaded_by(*names: str) -> set[str]:
    """Return the modules in memory after a fresh interpreter has imported all of these."""
    modules = ", ".join(module for name in names for module in modules_of(name))
    program = f"import sys, {modules}; print(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", program], text=True).split())


@pytest.mark.parametrize("law", ["client", "jax-free", "service-without-jax", "openai-front"])
def test_loads_no_jax(law: str) -> None:
    """What all of them load together is what each of them loads, and one process takes a second."""
    assert loaded_by(*SOURCES[law]).isdisjoint({"jax", "jaxlib", "flax", "transformers", "torch"})


def test_text_loads_no_jax() -> None:
    assert loaded_by(*SOURCES["text-without-jax"]).isdisjoint({"jax", "jaxlib", "flax"})


@pytest.mark.ci
def test_a_server_that_starts_loads_no_transformers() -> None:
    """Its import takes as long as JAX's, and 40 MiB. Only some models need it (`text.by_transformers`)."""
    needed = loaded_by("penstock.server_cli.commands.serve", "penstock.runtime.building")
    assert needed.isdisjoint({"transformers", "huggingface_hub", "torch"})
    assert needed.isdisjoint({"opentelemetry.sdk"})  # only what sends traces or metrics needs it


@pytest.mark.ci
def test_the_engine_loads_no_transport() -> None:
    assert loaded_by("penstock.runtime").isdisjoint({"grpc", "google", "opentelemetry"})


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.name)
def test_no_root_claims_the_namespace(root: Path) -> None:
    assert (root / "penstock").is_dir()
    assert not (root / "penstock" / "__init__.py").exists(), "it would hide the other roots"


def test_every_part_is_under_the_law_and_typed() -> None:
    parts = {path.parent for root in ROOTS for path in (root / "penstock").glob("*/__init__.py")}
    assert {f"penstock.{part.name}" for part in parts} == set(LAW["root_packages"])
    assert [part for part in parts if not (part / "py.typed").exists()] == []
