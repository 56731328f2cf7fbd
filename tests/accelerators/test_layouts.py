"""How XLA stores weights on TPUs, by the compiled HLO, beside what `has_outputs_last` says of it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from penstock.runtime.config import EngineConfig
from penstock.runtime.ops.products import has_outputs_last
from penstock.runtime.planning.absent import absent_backend, devices_of, lacking, prepare
from penstock.runtime.planning.chips import CHIPS, read_machine

pytestmark = [
    pytest.mark.users_xla,
    pytest.mark.sweep,
    pytest.mark.skipif(lacking(CHIPS["tpu-v5e"]) is not None, reason="no libtpu: make test-accelerators"),
]
SIZES = (
    (5760, 2880),  # gpt-oss-20b's experts, whole and an eighth of them
    (2880, 2880),
    (2880, 360),
    (720, 2880),
    (4096, 352),  # GLM-4.5-Air's on four devices
    (2048, 96),
    (96, 2048),
    (1000, 1608),
    (1608, 1000),
    (64, 32),
    (32, 64),
    (24, 40),
    (40, 24),
)


@pytest.mark.parametrize("chip", ["tpu-v5e", "tpu-v6e", "tpu-v7x"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float32])
def test_weights_are_stored_as_is_said(chip: str, dtype: jnp.dtype) -> None:
    prepare()
    machine = read_machine(chip)
    on_chip = SingleDeviceSharding(devices_of(machine)[0])
    given = [jax.ShapeDtypeStruct((4, *size), dtype, sharding=on_chip) for size in SIZES]
    program = jax.jit(lambda arrays: [array + array for array in arrays]).lower(given)
    options = absent_backend(machine, EngineConfig(compilation_cache=None)).compiler_options
    text = (program.compile(None if options is None else dict(options)).as_text() or "").split("->")[0]
    stored = re.findall(r"\w+\[4,(\d+),(\d+)\]\{(\d),", text)
    assert [(int(outputs), int(inputs)) for outputs, inputs, _ in stored] == list(SIZES)
    said = [1 if has_outputs_last(jnp.zeros((1, *size), jnp.int8)) else 2 for size in SIZES]
    assert [int(last) for _, _, last in stored] == said
