"""The fake engine with weights that can be updated: the real updater, on two tensors in host memory. No token
depends on them. It imports JAX, as the updater does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.config import CPU_SIZES
from penstock.runtime.execution.backend import Backend, mesh_of
from penstock.runtime.loading.dtypes import DTYPES
from penstock.runtime.measuring.update_meters import UpdateMeters
from penstock.runtime.models.load_rules import LoadRule, LoadRules, ParamPath, Source, Target
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.interface import UpdateOptions
from penstock.runtime.updating.updater import Updater
from penstock.runtime.updating.upload import Upload
from tests.service.fake import TENSORS, FakeEngine
from tests.service.rig import fake

RULES = LoadRules(
    rules=tuple(
        LoadRule(
            sources=(Source(name, tensor.shape),),
            targets=(Target((name,)),),
            num_rows=tensor.shape[0],
            dtype=DTYPES[tensor.dtype],
        )
        for name, tensor in TENSORS.items()
    )
)
"""Each tensor is a leaf of its own, of the same name."""


class HostLeaves:
    """Stands in for the device. The weights of the start are zeros."""

    def __init__(self) -> None:
        self.leaves_by_path: dict[ParamPath, NDArray[Any]] = {
            (name,): np.zeros(tensor.shape, DTYPES[tensor.dtype]) for name, tensor in TENSORS.items()
        }

    def place(self, path: ParamPath, leaf: NDArray[Any]) -> NDArray[Any]:
        return leaf

    def replace_leaves(self, new: dict[ParamPath, NDArray[Any]]) -> None:
        self.leaves_by_path = self.leaves_by_path | new


class WatchedUpload:
    """An upload that notes what was done with it, and waits where a test says so."""

    def __init__(self, upload: Upload, events: list[str], waits: threading.Event) -> None:
        self._upload, self._events, self._waits = upload, events, waits

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._upload, name)

        def watched(*args: Any) -> Any:
            if name == "write":
                assert self._waits.wait(60)
            done = method(*args)
            self._events.append(name)
            return done

        return watched


class WatchedUpdater(Updater):
    """The updater of such an engine, which notes what it is asked for."""

    def __init__(self, engine: FakeEngine) -> None:
        self._leaves = HostLeaves()
        backend = Backend(mesh=mesh_of(jax.devices()[:1]), sizes=CPU_SIZES, host_memory=None)
        meters = UpdateMeters(engine.registry)
        super().__init__(engine, cast(Any, self._leaves), RULES, backend=backend, meters=meters, threads=1)
        self.events: list[str] = []
        """What the updater was asked for, and what was done with uploads, in order."""
        self.options: list[UpdateOptions] = []
        """Of each upload that has begun."""
        self.waits = threading.Event()
        """While this is not set, `begin`, `open_uri` and `write` wait."""
        self.waits.set()

    @property
    def serving(self) -> dict[str, bytes]:
        """The bytes of each tensor that serves."""
        return {str(path[0]): leaf.tobytes() for path, leaf in self._leaves.leaves_by_path.items()}

    def validate(self, options: UpdateOptions, sent: Sequence[SentTensor]) -> None:
        self.events.append("validate")
        super().validate(options, sent)

    def validate_uri(self, options: UpdateOptions, uri: str, *, roots: Sequence[Path]) -> None:
        self.events.append("validate_uri")
        super().validate_uri(options, uri, roots=roots)

    def begin(self, options: UpdateOptions, sent: Sequence[SentTensor]) -> Any:
        self.events.append("begin")
        return self._watched(options, super().begin(options, sent))

    def open_uri(self, options: UpdateOptions, uri: str, *, roots: Sequence[Path]) -> Any:
        self.events.append("open_uri")
        return self._watched(options, super().open_uri(options, uri, roots=roots))

    def _watched(self, options: UpdateOptions, upload: Upload) -> WatchedUpload:
        self.options.append(options)
        assert self.waits.wait(60)
        return WatchedUpload(upload, self.events, self.waits)


def updatable(**options: Any) -> FakeEngine:
    """Make a fake engine, with the options of `fake`, whose updater is a WatchedUpdater."""
    engine = fake(**options)
    engine.updater = WatchedUpdater(engine)
    return engine
