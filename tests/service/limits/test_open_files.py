"""Connections and open files, with limits that the test makes up."""

from __future__ import annotations

import logging
import resource

import pytest

from penstock.service.limits import bounds

ANY = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Limits on open files; the last one is in force."""
    set_ones = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: set_ones[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: set_ones.append(limit))
    return set_ones


@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        ((1024, 4096), 2000, (2000, 4096)),
        ((1024, 4096), 5000, (4096, 4096)),
        ((1024, ANY), 5000, (5000, ANY)),
        ((8000, 9000), 5000, (8000, 9000)),
        ((ANY, ANY), 5000, (ANY, ANY)),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may_be(limits, before, wanted, after) -> None:
    limits.append(before)
    bounds.raise_limit(wanted)
    assert limits[-1] == after


@pytest.mark.parametrize(
    ("soft", "wanted", "num_addresses", "allowed"),
    [
        (1024, 500, 1, 500),
        (1024, 4096, 1, 768),
        (1024, 0, 1, 0),
        (300, 4096, 1, 150),
        (ANY, 4096, 3, 4096),
        (1024, 384, 2, 384),
        (1024, 385, 2, 384),
        (1024, 0, 2, 0),
        (3, 7, 3, 1),
    ],
)
def test_connections_leave_files_to_the_rest(limits, caplog, soft, wanted, num_addresses, allowed) -> None:
    limits.append((soft, ANY))
    with caplog.at_level(logging.WARNING):
        assert bounds.connections(wanted, num_addresses) == allowed
    assert bool(caplog.records) == (allowed != wanted), "the operator is told"
