"""A small storm of faults: `python -m tests.storm` is the large one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storm.__main__ import faults_of
from tests.storm.run import storm


@pytest.mark.sweep
@pytest.mark.timeout(900)
async def test_a_storm_leaves_nothing_behind_and_changes_no_honest_answer(tmp_path: Path) -> None:
    finding = await storm(
        tmp_path, num_faults=60, seconds=6, seed=1, quiet_s=1, at_once=8, say=lambda line: None
    )
    assert faults_of(finding) == []
    assert finding.num_faults == 60
