"""The leader's runner: each of its calls goes into the dispatch log before the leader makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.device_state import DeviceState
from penstock.runtime.execution.images import EncodeCall
from penstock.runtime.execution.program_set import Programs
from penstock.runtime.execution.runner import AwaitingTokens, Ints, ModelRunner, PendingStep, ProgramCalls
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.execution.step_programs import Chosen
from penstock.runtime.following.facts import program_facts
from penstock.runtime.following.interface import CHECKED, Call, DispatchLog, Kind
from penstock.runtime.following.joining import check_adapters, check_images
from penstock.runtime.scheduling.plan import Plan, StepResult

_STATUSES = tuple(
    f"{status}: "
    for status in ("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE", "UNKNOWN")
)
"""How XLA's errors begin where a program was called as it should be."""


class LeadingCalls(ProgramCalls):
    """Calls of programs that go into the log first, so that followers make them at the same time."""

    def __init__(
        self, programs: Programs, device: DeviceState, config: RunnerConfig, log: DispatchLog
    ) -> None:
        super().__init__(programs, device, config)
        self._log = log

    def forward(
        self, key: ProgramKey, packed: Ints, *, has_proposed: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """See `ProgramCalls`."""
        kind = Kind.FORWARD_PROPOSED if has_proposed else Kind.FORWARD
        self._log.append(Call(kind, key.name, (packed,)))
        return super().forward(key, packed, has_proposed=has_proposed)

    def window(self, key: ProgramKey, packed: Ints) -> Chosen:
        """See `ProgramCalls`."""
        self._log.append(Call(Kind.WINDOW, key.name, (packed,)))
        return super().window(key, packed)

    def guess(self, rows: int, packed: Ints) -> None:
        """See `ProgramCalls`."""
        self._log.append(Call(Kind.GUESS, str(rows), (packed,)))
        super().guess(rows, packed)

    def choose(
        self, logits: jax.Array, packed: Ints, mask: Ints | None, checks: Ints | None = None
    ) -> Chosen:
        """See `ProgramCalls`. The logits are those of the last forward."""
        masks = () if mask is None else (mask,)
        if checks is None:
            self._log.append(Call(Kind.CHOOSE, arrays=(packed, *masks)))
        else:
            self._log.append(Call(Kind.CHOOSE, CHECKED, (packed, checks, *masks)))
        return super().choose(logits, packed, mask, checks)

    def prompt_logprobs(self, hidden: jax.Array, packed: Ints) -> jax.Array:
        """See `ProgramCalls`. The hidden states are those of the last forward."""
        self._log.append(Call(Kind.PROMPT_LOGPROBS, arrays=(packed,)))
        return super().prompt_logprobs(hidden, packed)

    def hidden_sums(self, hidden: jax.Array, packed: Ints) -> jax.Array:
        """See `ProgramCalls`. The hidden states are those of the last forward."""
        self._log.append(Call(Kind.HIDDEN_SUMS, arrays=(packed,)))
        return super().hidden_sums(hidden, packed)

    def admit(self, packed: Ints, bias: NDArray[np.float32]) -> None:
        """See `ProgramCalls`."""
        self._log.append(Call(Kind.ADMIT, arrays=(packed, bias)))
        super().admit(packed, bias)

    def write_table_rows(self, packed: Ints) -> None:
        """See `ProgramCalls`."""
        self._log.append(Call(Kind.TABLE_ROWS, arrays=(packed,)))
        super().write_table_rows(packed)

    def copy_pairs(self, pairs: Ints) -> None:
        """See `ProgramCalls`."""
        self._log.append(Call(Kind.COPY_PAGES, arrays=(pairs,)))
        super().copy_pairs(pairs)

    def write_adapter(self, slot: int, values: NDArray[Any], digest: str = "") -> None:
        """See `ProgramCalls`. What each device has is a call of its own."""
        for of_device in values:
            arrays = (np.array(slot, np.int32), of_device.view(np.uint8))
            self._log.append(Call(Kind.WRITE_ADAPTER, digest, arrays))
        super().write_adapter(slot, values, digest)

    def encode_one(self, call: EncodeCall) -> None:
        """See `ProgramCalls`."""
        inputs = (np.asarray(array) for array in jax.tree.leaves(call.inputs))
        self._log.append(Call(Kind.ENCODE, str(call.bucket), (call.packed, *inputs)))
        super().encode_one(call)


class LeadingRunner(ModelRunner):
    """The runner of a group's leader. An error of the device, which a lost follower causes, is told as the
    group's end. ConfigError for images, and places of adapters, that no call can have.
    """

    def __init__(self, device: DeviceState, config: RunnerConfig, log: DispatchLog) -> None:
        check_images(config.vision, config.encode_buckets)
        check_adapters(config)
        super().__init__(device, config)
        self._log = log

    def compile(self) -> None:
        """See `ModelRunner`. The warm-up runs collectives, too."""
        with _explained_by(self._log):
            super().compile()

    def make_calls(self, programs: Programs) -> ProgramCalls:
        """Wait until the followers have compiled the same programs."""
        self._log.begin(program_facts(self, programs))
        return LeadingCalls(programs, self.device, self.config, self._log)

    def execute_async(self, plan: Plan) -> PendingStep:
        """See `ModelRunner`."""
        with _explained_by(self._log):
            return super().execute_async(plan)

    def choose(self, step: PendingStep) -> AwaitingTokens:
        """See `ModelRunner`."""
        with _explained_by(self._log):
            return super().choose(step)

    def wait(self, step: PendingStep) -> StepResult:
        """See `ModelRunner`."""
        with _explained_by(self._log):
            return super().wait(step)

    def free_kv_cache(self) -> int:
        """See `Runner`."""
        self._log.append(Call(Kind.FREE_KV_CACHE))
        return super().free_kv_cache()

    def restore_kv_cache(self) -> None:
        """See `Runner`."""
        self._log.append(Call(Kind.RESTORE_KV_CACHE))
        super().restore_kv_cache()

    def offload_weights(self) -> int:
        """See `Runner`."""
        self._log.append(Call(Kind.OFFLOAD_WEIGHTS))
        return super().offload_weights()

    def restore_weights(self) -> None:
        """See `Runner`."""
        self._log.append(Call(Kind.RESTORE_WEIGHTS))
        super().restore_weights()


@contextlib.contextmanager
def _explained_by(log: DispatchLog) -> Iterator[None]:
    """Raise GroupEnded in place of an error of the device: a collective fails if a process is lost."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not is_devices(error):
            raise
        raise log.explained(error) from error


def is_devices(error: Exception) -> bool:
    """Say whether an error is one of the device. Where XLA computes a small program within the call, as it
    does with a small sum of a group's processes, JAX raises a ValueError of XLA's status in place of its own
    error.
    """
    return isinstance(error, jax.errors.JaxRuntimeError) or str(error).startswith(_STATUSES)
