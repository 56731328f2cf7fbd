"""The built-in demo model on an engine. All tests use the same options, so that they share its programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from penstock.runtime import Engine, EngineConfig
from tests.support.models.compilation_cache import TEST_CACHE


@contextlib.contextmanager
def demo_engine() -> Iterator[Engine]:
    """Yield a started engine. After the test it asserts that nothing was compiled since the start and that no
    request holds pages.
    """
    config = EngineConfig(
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        compilation_cache=TEST_CACHE,
        show_progress=False,
    )
    with Engine.from_pretrained("demo", config) as engine:
        yield engine
        assert engine.compiles_after_warmup == 0
        assert engine.load().pages_used == 0
