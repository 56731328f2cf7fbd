"""Programs that one machine compiled are taken by another only if every fact agrees, and what differs is
named.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime import Engine, EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution import backend, compiled_set, cpu_threads, program_set
from penstock.runtime.execution.backend import Backend, choose_backend
from penstock.runtime.following.interface import GroupOptions
from penstock.runtime.following.joining import check_options
from penstock.runtime.planning.absent import checkpoint_programs
from tests.support.goldens import GOLDEN, with_heads

DEVICES = jax.devices("cpu")[:1]
OPTIONS = EngineConfig(
    native="off",
    kv_cache_bytes=2**20,
    max_model_len=64,
    max_num_seqs=2,
    max_num_batched_tokens=16,
    compilation_cache=None,
    show_progress=False,
)


def facts(model: str = "qwen3", **changes: Any) -> compiled_set.Facts:
    options = dataclasses.replace(OPTIONS, **changes)
    folder = str(GOLDEN / model)  # of an absolute path, the path
    return checkpoint_programs(folder, options, choose_backend(options, *DEVICES)).facts()


@pytest.fixture(scope="module")
def there() -> compiled_set.Facts:
    return facts()


def named(here: compiled_set.Facts, there: compiled_set.Facts) -> set[str]:
    """Return the names of the facts of which a message speaks."""
    said = compiled_set.differences(here, there)
    return {each.partition(": ")[0].removesuffix(" differs") for each in said}


def test_facts_are_the_same_each_time_and_hold_no_folder(there: compiled_set.Facts) -> None:
    """What each process has for itself does not count."""
    again = facts(threads=1, compilation_cache=Path("/elsewhere"), compiled=Path("/there"))
    assert compiled_set.differences(again, there) == []
    told = json.dumps(dict(again))
    assert not any(path in told for path in ("/elsewhere", "/there", str(GOLDEN), str(Path.home())))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_num_seqs": 4}, "max_num_seqs"),
        ({"max_num_batched_tokens": 32}, "buckets"),
        ({"max_model_len": 32}, "max_model_len"),
        ({"page_size": 16}, "page_size"),
        ({"kv_cache_bytes": 2**19}, "the pages of the cache"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"kv_cache_dtype": "int8"}, "kv_dtype"),
        ({"quantization": "int8"}, "the model's structure"),
        ({"max_decode_steps": 4}, "max_decode_steps"),
        ({"max_logprobs": 3}, "max_logprobs"),
        ({"feature_slots": 1}, "feature_slots"),
        ({"speculation": "lookup"}, "checks_proposals"),
        ({"speculation": "draft", "draft_model": str(GOLDEN / "qwen3")}, "drafted_tokens"),
        ({"max_adapters": 1}, "max_adapters"),
        ({"model": "qwen2"}, "the shapes of weights, cache and state"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_that_differs_is_named(
    there: compiled_set.Facts, changes: dict[str, Any], expected: str
) -> None:
    assert expected in named(facts(**changes), there)


def guessing(speculation: str, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Return a golden, and the options of a server in which something guesses tokens on the device."""
    if speculation == "heads":
        return str(with_heads("deepseek_v3", tmp_path)), {"speculation": "heads"}
    return str(GOLDEN / "qwen3"), {"speculation": "draft", "draft_model": str(GOLDEN / "qwen3")}


@pytest.mark.ci
@pytest.mark.parametrize("speculation", ["draft", "heads"])
def test_what_guesses_tokens_has_the_facts_of_an_engine(speculation: str, tmp_path: Path) -> None:
    model, changes = guessing(speculation, tmp_path)
    options = dataclasses.replace(OPTIONS, **changes)
    device = Engine.from_pretrained(model, options).runner.device
    made = device.builder(device.num_pages).facts()
    assert compiled_set.differences(facts(model, **changes), made) == []


def test_every_version_the_code_and_the_machine_are_named(
    there: compiled_set.Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: "0.0.1")
    monkeypatch.setattr(compiled_set, "code_digest", lambda: b"other")
    monkeypatch.setattr(backend, "processor", lambda: "an abacus")
    monkeypatch.setattr(cpu_threads, "pool_size", lambda: 99)
    monkeypatch.setenv("XLA_FLAGS", "--xla_abacus")
    before = jax.config.values["jax_random_seed_offset"]
    jax.config.update("jax_random_seed_offset", 7)
    try:
        here = facts()
    finally:
        jax.config.update("jax_random_seed_offset", before)
    assert named(here, there) == {
        *(f"the version of {name}" for name in ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")),
        "the code of penstock.runtime",
        "the processor",
        "the threads and processors",
        "XLA_FLAGS",
        "the setting jax_random_seed_offset",
    }


class Chip:
    """A device as JAX shows it."""

    def __init__(self, platform: str, device_kind: str, capability: str, coords: tuple[int, ...]) -> None:
        self.platform, self.device_kind, self.id = platform, device_kind, coords[0]
        self.compute_capability, self.coords = capability, coords


def on(*chips: Chip) -> Backend:
    """Make a backend on these devices."""
    mesh: Any = types.SimpleNamespace(devices=np.array(chips))
    return dataclasses.replace(choose_backend(OPTIONS, *DEVICES), mesh=mesh)


def of_devices(*chips: Chip) -> dict[str, str]:
    return on(*chips).device_facts()


def test_the_device_is_named() -> None:
    """A GPU counts by what it can, because XLA does not know the name of one that is not there."""
    v5e, v6e = (Chip("tpu", kind, "", (0, 0, 0)) for kind in ("TPU v5 lite", "TPU v6 lite"))
    assert named(of_devices(v5e), of_devices(v6e)) == {"the kind of device"}
    moved = Chip("tpu", "TPU v5 lite", "", (0, 1, 0))
    assert named(of_devices(v5e), of_devices(moved)) == {"the places of the devices"}
    assert named(of_devices(v5e, moved), of_devices(v5e)) == {"the devices", "the places of the devices"}
    absent, here = (Chip("gpu", kind, "9.0", (0,)) for kind in ("h100", "NVIDIA H100 80GB HBM3"))
    assert named(of_devices(absent), of_devices(here)) == set()
    assert named(of_devices(absent), of_devices(Chip("gpu", "b200", "10.0", (0,)))) == {"the kind of device"}


def doubled() -> jax.stages.Compiled:
    """Its like is not in JAX's cache, of which XLA cannot write a program again."""
    number = float(uuid4().int % 10**6)
    return (
        jax.jit(lambda x: x * 2 + (x - x) * number).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
    )


def read(folder: Path, facts: dict[str, str]) -> Any:
    return compiled_set.read(folder, facts, DEVICES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compiled") / "made"
    compiled_set.begin(out)
    compiled_set.write(out, {"size": "3", "kind": "one"}, {"double": doubled()})
    return out


def test_a_set_that_agrees_is_taken(folder: Path) -> None:
    compiled_set.check(folder)
    programs = read(folder, {"size": "3", "kind": "one"})
    assert programs.keys() == {"double"}
    assert programs["double"](jnp.array([1.0, 2.0, 4.0])).tolist() == [2.0, 4.0, 8.0]


def test_one_that_differs_is_not_opened_and_each_fact_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read"))
    with caplog.at_level(logging.WARNING):
        assert read(folder, {"size": "4", "new": "x" * 99}) == {}
    said = "size: '4' here, '3' there; new differs; kind: 'not known' here, 'one' there"
    assert caplog.messages == [f"{folder} is not used, and programs are compiled: {said}"]


def test_programs_that_are_not_those_of_the_facts_are_not_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled_set.write(tmp_path, {"size": "3"}, {"double": doubled()})
    (tmp_path / "programs").write_bytes(b"cos\nabort\n(tR.")  # ends the process that unpickles it
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, {"size": "3"}) == {}
    assert "is not the one that was written with its facts" in caplog.text


def test_a_folder_of_something_else_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^compiled: .* has no facts\.json, which penstock"):
        Engine.from_pretrained(os.fspath(tmp_path / "no model"), EngineConfig(compiled=tmp_path))


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_set, "compile_all", lambda *_, **__: pytest.fail("programs are compiled"))
    builder = checkpoint_programs(str(GOLDEN / "qwen3"), OPTIONS, choose_backend(OPTIONS, *DEVICES))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^out: .* cannot be written"):
        builder.write(tmp_path / "file")


def test_a_set_that_is_being_made_again_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled_set.write(tmp_path, {"size": "3"}, {"double": doubled()})
    compiled_set.begin(tmp_path)
    assert read(tmp_path, {"size": "3"}) == {}
    assert "cannot be read" in caplog.text


def test_what_has_no_text_is_refused() -> None:
    backend = dataclasses.replace(choose_backend(OPTIONS, *DEVICES), sampler=lambda *_: None)  # type: ignore[arg-type]
    builder = checkpoint_programs(str(GOLDEN / "qwen3"), OPTIONS, backend)
    with pytest.raises(ConfigError, match=r"^compiled: what programs are made of cannot be told by a text"):
        builder.facts()


def test_models_that_read_images_are_refused() -> None:
    with pytest.raises(ConfigError, match="reads images, and programs of such models are compiled where"):
        checkpoint_programs(str(GOLDEN / "qwen2_5_vl"), OPTIONS, choose_backend(OPTIONS, *DEVICES))


def test_the_size_of_the_cache_must_be_told_for_a_chip() -> None:
    options = dataclasses.replace(OPTIONS, kv_cache_bytes=None)
    backend = on(Chip("tpu", "TPU v5 lite", "", (0, 0, 0)))
    with pytest.raises(ConfigError, match=r"^kv_cache_bytes: must be given"):
        checkpoint_programs(str(GOLDEN / "qwen3"), options, backend)


def test_a_group_is_refused() -> None:
    config = EngineConfig(compiled=Path("there"), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"^compiled: is for one process"):
        check_options(config, GroupOptions(processes=2, process_id=0, coordinator="here:1"))


SERVES = """
import json, logging, sys
from pathlib import Path
from penstock.runtime import Engine, EngineConfig, SamplingParams, StoppingParams
from penstock.runtime.execution import compilation, program_set

logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
compiled, lower_program = [], compilation.lower_program

def counted(*arguments, **options):
    compiled.append(options.get("name"))
    return lower_program(*arguments, **options)

program_set.lower_program = counted
model, folder, prompt, options = sys.argv[1], Path(sys.argv[2]), *map(json.loads, sys.argv[3:])
config = EngineConfig(compilation_cache=None, compiled=folder, **options)
with Engine.from_pretrained(model, config) as engine:
    greedy, most = SamplingParams(temperature=0), StoppingParams(max_tokens=8, ignore_eos=True)
    out = engine.generate(prompt, sampling=greedy, stopping=most)
    assert engine.compiles_after_warmup == 0
    print(json.dumps([list(out.token_ids), len(compiled)]))
"""


@pytest.mark.sweep
@pytest.mark.parametrize("speculation", ["off", "draft", "heads"])
def test_what_one_process_compiles_another_serves(tmp_path: Path, speculation: str) -> None:
    """It compiles nothing, and its tokens are PyTorch's. With another option it says so, and compiles."""
    out = tmp_path / "out"
    model, changes = str(GOLDEN / "qwen3"), dict[str, Any]()
    if speculation != "off":
        model, changes = guessing(speculation, tmp_path)
    sizes: dict[str, Any] = {
        "kv_cache_bytes": 2**20,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        **changes,
    }
    given = [part for name, value in sizes.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "penstock.cli", "compile", model, "--for", "cpu", "--out", str(out)]
    done = subprocess.run([*command, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"are in {out}" in done.stdout
    expected = json.loads((Path(model) / "expected.json").read_text())["cases"][0]

    def serve(**changes: Any) -> tuple[list[int], int, str]:
        arguments = [model, str(out), json.dumps(expected["prompt"]), json.dumps(sizes | changes)]
        done = subprocess.run(
            [sys.executable, "-c", SERVES, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        tokens, compiled = json.loads(done.stdout)
        return tokens, compiled, done.stderr

    tokens, compiled, said = serve()
    assert (tokens, compiled) == (expected["tokens"][:8], 0)
    assert "is not used" not in said
    tokens, compiled, said = serve(max_logprobs=3)
    assert tokens == expected["tokens"][:8]
    assert compiled > 0
    assert "max_logprobs: '3' here, '20' there" in said
