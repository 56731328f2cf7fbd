"""New weights that lie beside those that serve, until it is their turn."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from penstock.runtime.execution.runner import ModelRunner
from penstock.runtime.host import host_memory
from penstock.runtime.loading.served_model import Renewal, ServedModel


class StagedUpdate:
    """Weights that were made from named tensors. They are on the device and do not serve yet."""

    def __init__(
        self, model: ServedModel, runner: ModelRunner, tensors: Mapping[str, NDArray[Any]], *, partial: bool
    ) -> None:
        """Makes the weights leaf by leaf, while the old ones serve. With `partial`, tensors that are not
        named stay as they are. Raises CheckpointError naming every missing, extra or wrongly shaped tensor,
        or UnsupportedFeature if the model takes no updates; then nothing is kept.
        """
        self._runner = runner
        try:
            self._renewal: Renewal | None = model.staged(runner.weights, tensors, partial)
        except BaseException as error:
            traceback.clear_frames(
                error.__traceback__
            )  # its frames hold the leaves that were made until then
            host_memory.let_go()
            raise

    def install(self) -> None:
        """Makes these the weights that serve. To be called once, between two steps. On ConfigError the old
        weights serve on.
        """
        self._runner.replace_weights(self._take()(self._runner.weights))
        host_memory.let_go()

    def drop(self, *_: object) -> None:
        """Frees the weights if they were not installed, because the update was refused or taken back before
        its turn. Any arguments are ignored, so this can be a callback of the update's future.
        """
        self._renewal = None
        host_memory.let_go()

    def _take(self) -> Renewal:
        """Hands the new weights over. After that only the runner holds them, so that a later update can free
        them.
        """
        renewal, self._renewal = self._renewal, None
        assert renewal is not None, "a staged update is installed once"
        return renewal
