"""The changelog is about the version that the code is."""

from __future__ import annotations

import re
import tomllib

from penstock.service.servicers.control import CONTRACT_REVISION
from tests.docs.pages import ROOT, text_of

PAGE = ROOT / "CHANGELOG.md"
_HEADING = re.compile(r"^## (\d+)\.(\d+)\.(\d+), (not released yet|\d{4}-\d{2}-\d{2})$")


def sections() -> dict[str, str]:
    """Each version's heading, as it stands, with what is below it."""
    _, *found = re.split(r"^(?=## )", text_of(PAGE), flags=re.M)
    return {section.partition("\n")[0]: section.partition("\n")[2] for section in found}


def test_versions_come_newest_first_and_only_the_newest_may_be_unreleased() -> None:
    parsed = [_HEADING.match(heading) for heading in sections()]
    assert all(parsed), list(sections())
    versions = [tuple(int(part) for part in found.groups()[:3]) for found in parsed if found]
    assert versions == sorted(set(versions), reverse=True)
    assert not any("not released" in heading for heading in list(sections())[1:])


def test_the_newest_section_is_about_this_version_and_its_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    heading, text = next(iter(sections().items()))
    assert heading.startswith(f"## {project['version']}, ")
    assert f"Contract revision {CONTRACT_REVISION}." in text
