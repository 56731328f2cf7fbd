"""JAX as users of the examples have it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _default_promotions() -> Iterator[None]:
    """Allow the promotions that the demo model's training forward and optax rely on, and that the suite
    forbids.
    """
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
