"""One browser for the tests of a file: a tab has storage and cache of its own, so it starts from nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.openai.page.rig import Page, opened, running_browser
from tools.page.chromium import Chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with running_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Chromium) -> Iterator[Page]:
    with opened(browser) as page:
        yield page
