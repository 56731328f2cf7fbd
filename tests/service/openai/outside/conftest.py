"""One demo server behind one OpenAI front, for all tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.openai.outside.demo_front import Endpoint, demo_front


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with demo_front(tmp_path_factory.mktemp("outside")) as endpoint:
        yield endpoint
