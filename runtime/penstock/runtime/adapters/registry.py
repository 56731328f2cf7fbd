"""AdapterRegistry: the adapters of an engine, by name."""

from __future__ import annotations

from pathlib import Path

from penstock.runtime.adapters.interface import AdapterInfo, AdapterTensors
from penstock.runtime.errors import UnknownAdapterError, UnsupportedFeature


class AdapterRegistry:
    """Loads, lists and unloads adapters. Any thread may call it at any time; `load` blocks until the adapter
    can be named, the others only for a moment.
    """

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters

    @property
    def is_on(self) -> bool:
        """Whether the engine was made for adapters."""
        return self._max_adapters > 0

    def load(
        self, name: str, source: Path | AdapterTensors, *, pinned: bool = False, replace: bool = False
    ) -> AdapterInfo:
        """Read an adapter, check it against the model and keep it on the host; it goes to the device when a
        request names it. The same content under the same name is loaded already, and changes nothing but
        `pinned`. With `replace` other content takes the name: outputs that run finish on the old weights.

        Raises InvalidRequest for a name that none can have, AdapterExistsError if the name has other content
        and `replace` is False, AdapterFormatError, TooManyAdaptersError if all that are kept are pinned or
        run, and UnsupportedFeature if the engine has no adapters.
        """
        raise self._off()

    def unload(self, name: str) -> None:
        """Take the name away. Outputs that run or wait finish on its weights, which are freed after them.
        Raises UnknownAdapterError.
        """
        raise UnknownAdapterError(name) if self.is_on else self._off()

    def pin(self, name: str, pinned: bool) -> AdapterInfo:
        """Say whether the adapter stays in memory while no output uses it. Raises UnknownAdapterError, and
        TooManyAdaptersError if all the places but one were pinned already.
        """
        raise UnknownAdapterError(name) if self.is_on else self._off()

    def list(self) -> tuple[AdapterInfo, ...]:
        """All adapters that are in memory, by name, without those of `adapter_dir` that nobody has named."""
        return ()

    def get(self, name: str) -> AdapterInfo:
        """The adapter of this name. Raises UnknownAdapterError."""
        raise UnknownAdapterError(name) if self.is_on else self._off()

    def _off(self) -> UnsupportedFeature:
        return UnsupportedFeature(("adapter",), "the server was started with max_adapters 0")
