"""Prometheus' configuration and the alerts, checked by Prometheus' own tool, and their page."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.files import PARTS, ROOT, RULE_TESTS, RULES, alerts, yaml_of
from tests.docs.pages import anchors_of, text_of

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool here (Debian's package prometheus)")
PAGE = ROOT / "docs" / "how-to" / "alerts.md"


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(PROMTOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@needs_promtool
def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    done = promtool("check", "config", PARTS / "prometheus" / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(alerts())} rules found" in done.stdout


@pytest.mark.ci
@needs_promtool
def test_alerts_fire_on_the_series_of_their_tests_and_on_no_others() -> None:
    done = promtool("test", "rules", RULE_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.ci
@needs_promtool
def test_a_rule_that_is_wrong_fails_its_test(tmp_path: Path) -> None:
    """So the tests of the rules do test something."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "rules").mkdir()
    (tmp_path / "tests" / RULE_TESTS.name).write_text(RULE_TESTS.read_text())
    rules = RULES.read_text()
    for wrong in (
        rules.replace("> 0.01", "> 0.5"),
        rules.replace("unless on (job, instance) penstock_paused == 1", ""),
    ):
        assert wrong != rules
        (tmp_path / "rules" / RULES.name).write_text(wrong)
        assert promtool("test", "rules", tmp_path / "tests" / RULE_TESTS.name).returncode == 1


def test_each_alert_has_a_test_that_it_fires_and_one_that_it_does_not() -> None:
    fires: set[str] = set()
    rests: set[str] = set()
    for group in yaml_of(RULE_TESTS)["tests"]:
        for case in group["alert_rule_test"]:
            (fires if case.get("exp_alerts") else rests).add(case["alertname"])
    assert fires == rests == {rule["alert"] for rule in alerts()}


def test_each_alert_has_a_severity_and_a_section_of_the_page_that_says_the_same() -> None:
    sections = dict(re.findall(r"^### (\w+)\n\n(.+?)(?=^#|\Z)", text_of(PAGE), re.M | re.S))
    assert set(sections) == {rule["alert"] for rule in alerts()}
    for rule in alerts():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert ROOT / page == PAGE
        assert anchor in anchors_of(PAGE)
        assert anchor == rule["alert"].lower()
        severity = rule["labels"]["severity"]
        assert severity in ("critical", "warning")
        assert sections[rule["alert"]].startswith(f"**{severity}.** ")
        assert {"summary", "description"} <= set(rule["annotations"])
