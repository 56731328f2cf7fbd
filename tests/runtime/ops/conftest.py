"""Programs of these tests are kept on disk."""

from __future__ import annotations

import pytest

from penstock.runtime.execution.compilation import use_compilation_cache
from tests.support.models.compilation_cache import TEST_CACHE


@pytest.fixture(scope="session", autouse=True)
def cache() -> None:
    use_compilation_cache(TEST_CACHE)
