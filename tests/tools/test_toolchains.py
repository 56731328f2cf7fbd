"""A missing toolchain is a skip that says what to install, or a failure where toolchains are required."""

from __future__ import annotations

import pytest

from tests.support import toolchains


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("PENSTOCK_REQUIRE_TOOLCHAINS", raising=False)


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("name", toolchains.TO_INSTALL)
def test_what_is_missing_is_skipped_and_named(name: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=f"no {name} here: install "):
        toolchains.require(name)


@pytest.mark.usefixtures("nothing_installed")
def test_what_is_required_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REQUIRE_TOOLCHAINS", "1")
    with pytest.raises(pytest.fail.Exception, match="no mvn here: install Maven"):
        toolchains.require("mvn")
    with pytest.raises(pytest.fail.Exception, match="no go here"):
        toolchains.go_program("grpcurl")


def test_what_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(toolchains.TO_INSTALL, "sh", "install a shell")
    toolchains.require("sh")


def test_every_program_is_pinned() -> None:
    pinned = (toolchains.TOOLS / "go.mod").read_text().partition("tool (")[2].partition(")")[0].split()
    assert sorted(pinned) == sorted(toolchains.PACKAGES.values())
