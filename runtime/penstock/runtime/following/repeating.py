"""A follower's part of a group: it makes the leader's calls, and reads no result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.execution.images import EncodeCall
from penstock.runtime.execution.program_set import Programs
from penstock.runtime.execution.runner import ModelRunner
from penstock.runtime.following.interface import CHECKED, Call, Kind
from penstock.runtime.following.sharing import FollowedUpdates
from penstock.runtime.ops.native.hashing import digest_of_values


class Repeater:
    """Makes the calls of a leader's log, one after the other, on one thread."""

    def __init__(self, runner: ModelRunner, programs: Programs, updates: FollowedUpdates) -> None:
        """Make the runner's calls, which are made here alone."""
        self._runner, self._updates = runner, updates
        self._calls = runner.make_calls(programs)
        self._keys = {key.name: key for key in programs.steps}
        self._logits: jax.Array | None = None
        self._hidden: jax.Array | None = None
        self._of_devices: list[NDArray[Any]] = []
        """What the first devices have of an adapter whose calls have not all come."""

    def repeat(self, call: Call) -> None:
        """Make a call. It is dispatched, and nothing waits for the device. ValueError for one that the
        leader's runner cannot have made.
        """
        calls, runner, arrays = self._calls, self._runner, call.arrays
        match call.kind:
            case Kind.FORWARD | Kind.FORWARD_PROPOSED:
                has_proposed = call.kind is Kind.FORWARD_PROPOSED
                forward = calls.forward(self._key(call.program), *arrays, has_proposed=has_proposed)
                self._logits, self._hidden = forward
            case Kind.WINDOW:
                calls.window(self._key(call.program), *arrays)
            case Kind.GUESS:
                calls.guess(self._guessed_rows(call.program), *arrays)
            case Kind.CHOOSE:
                packed, *others = arrays
                checks = others.pop(0) if call.program == CHECKED else None
                calls.choose(_there(self._logits), packed, others[0] if others else None, checks)
            case Kind.PROMPT_LOGPROBS:
                calls.prompt_logprobs(_there(self._hidden), *arrays)
            case Kind.HIDDEN_SUMS:
                calls.hidden_sums(_there(self._hidden), *arrays)
            case Kind.ADMIT:
                calls.admit(*arrays)
            case Kind.TABLE_ROWS:
                calls.write_table_rows(*arrays)
            case Kind.COPY_PAGES:
                calls.copy_pairs(*arrays)
            case Kind.ENCODE:
                calls.encode_one(self._encode_call(int(call.program), arrays))
            case Kind.WRITE_ADAPTER:
                self._write_adapter(call.program, *arrays)
            case _:
                repeat_change(call, runner, self._updates)

    def _write_adapter(self, digest: str, slot: NDArray[Any], of_device: NDArray[Any]) -> None:
        """Keep what one device has of an adapter, and write the adapter when all devices' has come."""
        device = self._runner.device
        if not device.adapters:
            raise ValueError("there are no places for adapters")
        (pool,) = device.adapters
        self._of_devices.append(of_device.view(pool.dtype))
        if len(self._of_devices) < device.sharding.mesh.size:
            return
        values, self._of_devices = np.stack(self._of_devices), []
        if digest and digest_of_values(values) != digest:
            raise ValueError(f"an adapter is not what the leader has under the digest {digest}")
        self._calls.write_adapter(int(slot), values, digest)

    def _key(self, name: str) -> Any:
        if name not in self._keys:
            raise ValueError(f"there is no program {name!r}")
        return self._keys[name]

    def _guessed_rows(self, program: str) -> int:
        rows = int(program)
        if rows not in self._calls.programs.guesses:
            raise ValueError(f"there is no program that guesses for {rows} rows")
        return rows

    def _encode_call(self, bucket: int, arrays: Sequence[NDArray[Any]]) -> EncodeCall:
        vision = self._runner.config.vision
        if vision is None:
            raise ValueError("the model reads no images")
        packed, *inputs = arrays
        tree = jax.tree.structure(vision.inputs((), bucket))
        return EncodeCall(bucket, jax.tree.unflatten(tree, inputs), packed)


def repeat_change(call: Call, runner: ModelRunner, updates: FollowedUpdates) -> None:
    """Make a call that changes what lies on the devices. ValueError for one of another kind."""
    match call.kind:
        case Kind.FREE_KV_CACHE:
            runner.free_kv_cache()
        case Kind.RESTORE_KV_CACHE:
            runner.restore_kv_cache()
        case Kind.OFFLOAD_WEIGHTS:
            runner.offload_weights()
        case Kind.RESTORE_WEIGHTS:
            runner.restore_weights()
        case Kind.INSTALL_WEIGHTS:
            updates.install(int(call.program))
        case _:
            raise ValueError(f"this process makes no calls of the kind {call.kind.value}")


def _there(array: jax.Array | None) -> jax.Array:
    """Return the result of the last forward. ValueError before the first one."""
    if array is None:
        raise ValueError("no forward came before")
    return array
