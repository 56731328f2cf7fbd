"""Golden checkpoints, and sequences of them without the engine."""

from pathlib import Path

import pytest

from tests.support.models.sequence import Sequence

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="session")
def golden_root() -> Path:
    """Return the folder of golden checkpoints."""
    return GOLDEN


@pytest.fixture(scope="session")
def make_sequence():
    """Make a function (config, state) -> Sequence."""
    return Sequence
