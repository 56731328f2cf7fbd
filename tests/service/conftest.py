"""One server for those tests of a file that only ask something: a start takes longer than most answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.service.rig import Rig, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server_of_file() -> AsyncIterator[Rig]:
    """Serve the fake engine, free-running, to all tests of a file that take `rig`."""
    async with serving() as rig:
        yield rig


@pytest.fixture
def rig(server_of_file: Rig) -> Iterator[Rig]:
    """Return the file's server, whose engine has seen no request. A file that takes it sets `pytestmark =
    pytest.mark.asyncio(loop_scope="module")`, because a server lives in one event loop.
    """
    engine = server_of_file.engine
    for kept in (engine.seen, engine.cancelled, engine.told):
        kept.clear()
    yield server_of_file
    engine.abort(all_requests=True)
    engine.flush_prefix_cache()
