"""Which weights serve, since when, and which served before. No jax."""

from __future__ import annotations

import datetime as dt

from penstock.runtime.loop.interface import WeightsVersion

MOST_REMEMBERED = 4096
"""How many versions are remembered, the newest ones."""


class ServingWeights:
    """Changes need the engine's lock; any thread may read this at any time."""

    def __init__(self) -> None:
        self.version = WeightsVersion("initial", 1)
        """The weights that serve now."""
        self.since = dt.datetime.now(dt.UTC)
        """When they went live."""
        self._versions = {self.version.generation: self.version}

    def version_of(self, generation: int) -> WeightsVersion:
        """The version of this generation; its label is empty where it is not remembered."""
        return self._versions.get(generation) or WeightsVersion("", generation)

    def go_live(self, label: str) -> None:
        """New weights serve from now on, as the next generation."""
        version = WeightsVersion(label, self.version.generation + 1)
        self._versions[version.generation] = version
        self._versions.pop(version.generation - MOST_REMEMBERED, None)
        self.since = dt.datetime.now(dt.UTC)
        self.version = version
