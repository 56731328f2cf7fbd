"""Programs that were kept on disk compute what they computed, and what they are made of is told in full."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.execution import program_store
from penstock.runtime.execution.program_store import Ahead, Fresh, Kept, load, save
from tests.support.goldens import GOLDEN

DEVICES = jax.devices("cpu")[:1]


class Sums(NamedTuple):
    """A tree of JAX's, as steps have them."""

    one: Any
    other: tuple[Any, ...]


def compiled(factor: float) -> jax.stages.Compiled:
    """Make a program that no cache of JAX's has."""
    factor += random.SystemRandom().random()

    def program(sums: Sums, array: jax.Array) -> Sums:
        return Sums(sums.one + factor * array, (array @ array.T, *sums.other))

    shape = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    return jax.jit(program).lower(Sums(shape, (shape,)), shape).compile()


def computed(program: jax.stages.Compiled) -> Any:
    array = jnp.arange(9, dtype=jnp.float32).reshape(3, 3)
    return jax.tree.map(np.asarray, program(Sums(array, (array,)), array))


def test_kept_programs_compute_the_same(tmp_path: Path) -> None:
    one, two = compiled(2.5), compiled(3.5)
    save(tmp_path, "key", Kept({}, {}), {"one": one})
    save(tmp_path, "key", load(tmp_path, "key", DEVICES), {2: two})
    found = load(tmp_path, "key", DEVICES).programs
    assert found.keys() == {"one", 2}
    for program, kept in ((one, found["one"]), (two, found[2])):
        expected, made = computed(program), computed(kept)
        assert isinstance(made, Sums)
        jax.tree.map(np.testing.assert_array_equal, made, expected)
    assert load(tmp_path, "other", DEVICES) == Kept({}, {})


def test_programs_of_the_start_before_are_read_ahead(tmp_path: Path) -> None:
    """Nothing is read a second time, because the file is gone; and another key's programs are not taken."""
    one, two = compiled(2.5), compiled(3.5)
    for key, program in (("one", one), ("two", two)):
        save(tmp_path, key, Kept({}, {}), {"program": program})
    for key, expected in (("one", one), ("two", two)):
        first = Ahead(tmp_path, "a start", DEVICES)
        assert first.take(tmp_path, key, DEVICES) is None  # it notes what there is to read
        ahead = Ahead(tmp_path, "a start", DEVICES)
        ahead._thread.join()
        assert Ahead(tmp_path, "another start", DEVICES).take(tmp_path, "three", DEVICES) is None
        (tmp_path / f"programs-{key}").unlink()
        found = load(tmp_path, key, DEVICES, ahead).programs["program"]
        jax.tree.map(np.testing.assert_array_equal, computed(found), computed(expected))
        assert load(tmp_path, key, DEVICES, ahead) == Kept({}, {})  # they are held once


def test_a_damaged_file_is_told_where_it_was_read_ahead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "programs-key").write_bytes(b"no pickle")
    Ahead(tmp_path, "a start", DEVICES).take(tmp_path, "key", DEVICES)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, "key", DEVICES, Ahead(tmp_path, "a start", DEVICES)) == Kept({}, {})
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize("name", ["models/one.py", "ops/native/src/one.cc", "ops/native/src/one.h"])
def test_the_digest_of_the_code_knows_every_file_that_programs_are_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(program_store, "_RUNTIME", tmp_path)
    (tmp_path / name).parent.mkdir(parents=True)
    digests = set()
    for text in ("one", "two"):
        (tmp_path / name).write_text(text)
        digests.add(program_store.code_digest.__wrapped__())
    assert len(digests) == 2


@pytest.mark.parametrize("content", [b"", b"no pickle", "cut"])
def test_a_file_that_cannot_be_read_is_told_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | str
) -> None:
    save(tmp_path, "key", Kept({}, {}), {"one": compiled(2.5)})
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-100] if isinstance(content, str) else content)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, "key", DEVICES) == Kept({}, {})
    assert "cannot be read" in caplog.text


def test_a_folder_that_can_only_be_read_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    save(tmp_path, "key", Kept({}, {}), {"one": compiled(2.5)})
    monkeypatch.setattr(os, "utime", refuse)
    assert load(tmp_path, "key", DEVICES).programs.keys() == {"one"}


def test_what_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no space is left")

    monkeypatch.setattr(Path, "replace", refuse)
    save(tmp_path, "key", Kept({}, {}), {"one": compiled(2.5)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("most", "processes"), [(2, 1), (1, 2)])
def test_the_oldest_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, processes: int
) -> None:
    """Of a folder that the processes of a group share, each may have so many."""
    monkeypatch.setattr(program_store, "MOST_FILES", most)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    for age, key in enumerate("abc"):
        save(tmp_path, key, Kept({}, {}), {"one": compiled(2.5)})
        os.utime(tmp_path / f"programs-{key}", (1000 + age, 1000 + age))
    save(tmp_path, "d", Kept({}, {}), {"one": compiled(2.5)})
    assert {file.name for file in tmp_path.iterdir()} == {"programs-c", "programs-d"}


def test_a_program_from_jax_s_cache_is_not_fresh() -> None:
    """What XLA writes of it could not be run."""
    hit = functools.partial(jax.monitoring.record_event, "/jax/compilation_cache/cache_hits")
    with Fresh() as fresh:
        fresh.run("compiled", lambda: compiled(1.0))
        fresh.run("read", lambda: (hit(), compiled(1.0))[1])
    hit()
    assert "read" not in fresh.names


@dataclasses.dataclass(frozen=True)
class Part:
    size: int
    work: Callable[..., Any]


def test_what_programs_are_made_of_is_told_in_full() -> None:
    values = [
        Part(1, jnp.zeros),
        Part(2, jnp.zeros),
        Part(1, jnp.ones),
        Part(1, functools.partial(jnp.zeros, shape=3)),
        Part(1, functools.partial(jnp.zeros, shape=4)),
        Sums(jnp.zeros, (jnp.ones,)),
        (jnp.zeros, (jnp.ones,)),
        "jax.numpy.zeros",
        None,
    ]
    assert len({program_store.described(value) for value in values}) == len(values)
    for value in (lambda: 0, Part(1, lambda: 0), object(), np.arange(3)):
        with pytest.raises(program_store.Untold):
            program_store.described(value)


STARTS = """
import json, logging, sys
from pathlib import Path
from penstock.runtime import Engine, EngineConfig, SamplingParams, StoppingParams

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
model, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
config = EngineConfig(compilation_cache=folder, kv_cache_bytes=2**20, max_model_len=64, **options)
with Engine.from_pretrained(model, config) as engine:
    greedy, most = SamplingParams(temperature=0), StoppingParams(max_tokens=8)
    out = engine.generate([1, 2, 3], sampling=greedy, stopping=most)
    assert engine.compiles_after_warmup == 0
    print(json.dumps(out.token_ids))
"""


@pytest.mark.ci
def test_the_next_start_loads_what_the_first_has_kept(tmp_path: Path) -> None:
    """Of an engine with other options it compiles what differs. The model is not traced again."""

    def start(**options: Any) -> tuple[list[int], str]:
        command = [sys.executable, "-c", STARTS, str(GOLDEN / "qwen3"), str(tmp_path), json.dumps(options)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    first, said = start(**sizes)
    assert "loaded" not in said
    again, said = start(**sizes)
    assert again == first
    assert "compiled programs in" in said
    assert "compiled 1 of" not in said
    other, said = start(**sizes, max_logprobs=3)
    assert other == first
    assert "compiled 1 of" in said
