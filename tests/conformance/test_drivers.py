"""How the driver for Java is built: once for each version of its sources, and again where jars are gone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.conformance import drivers

MAVEN = """#!/bin/sh
echo built >> "{folder}/built"
touch "{folder}/a.jar" "{folder}/b.jar"
mkdir --parents target
echo "{folder}/a.jar:{folder}/b.jar" > target/classpath.txt
"""
"""What stands in for Maven, whose own folder has the jars."""


@pytest.mark.ci
def test_the_driver_for_java_is_built_once_and_again_where_a_jar_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mvn"
    program.write_text(MAVEN.format(folder=tmp_path))
    program.chmod(0o755)
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "kept"))
    monkeypatch.setattr(drivers, "require", lambda *names: None)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for jar_is_gone, times in ((False, 1), (False, 1), (True, 2)):
        if jar_is_gone:
            (tmp_path / "b.jar").unlink()
        command = drivers._java.__wrapped__()
        assert f":{tmp_path}/a.jar:{tmp_path}/b.jar" in command[2]
        assert (tmp_path / "built").read_text().split() == ["built"] * times
