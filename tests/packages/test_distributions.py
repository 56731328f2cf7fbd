"""The two distributions agree with each other, and no page sends anybody to an index for them."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from penstock.cli.__main__ import COMMANDS
from tests.docs.pages import ROOT, pages, text_of

CLIENT = ROOT / "clients" / "python"


def project(folder: Any) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def test_they_have_one_version_and_the_engine_wants_the_client_of_it() -> None:
    client, engine = project(CLIENT), project(ROOT)
    assert client["name"] == "penstock-client"
    assert client["version"] == engine["version"]
    assert f"penstock-client=={client['version']}" in engine["dependencies"]
    for same in ("license", "requires-python"):
        assert client[same] == engine[same]
    assert (CLIENT / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert not {"jax", "flax", "numpy"} & {re.split(r"\W", name)[0] for name in client["dependencies"]}


def test_one_of_them_has_the_program() -> None:
    assert project(CLIENT)["scripts"] == {"penstock": "penstock.cli.__main__:main"}
    assert "scripts" not in project(ROOT)
    assert {"serve", "generate"} <= COMMANDS.keys()


INDEX = re.compile(
    r"\b(?:pip|pipx|uvx?)[ \t](?!uninstall )[^\n`]*?(?<![\w./-])penstock(?:-client)?(?=[\s`'\"=<>~\[]|$)"
)
"""A command that installs Penstock by its name, and not by a path."""


def test_the_pattern_finds_what_it_is_for() -> None:
    for wrong in (
        "pip install penstock",
        "pip install 'penstock[cuda]'",
        "uvx penstock serve",
        "uv add penstock-client",
    ):
        assert INDEX.search(wrong), wrong
    for right in (
        "pip install ./clients/python .",
        "pip uninstall penstock penstock-client",
        "pip install --find-links dist dist/penstock-0.1.0-py3-none-any.whl",
    ):
        assert not INDEX.search(right), right


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_installs_by_a_name(page: Any) -> None:
    """No index has Penstock, and on PyPI `penstock` is another project."""
    assert INDEX.findall(text_of(page)) == []


def test_no_message_installs_by_a_name() -> None:
    sources = [
        file for part in ("service", "runtime", "clients/python") for file in (ROOT / part).rglob("*.py")
    ]
    assert len(sources) > 300
    assert [file.name for file in sources if INDEX.search(file.read_text(encoding="utf-8"))] == []
