"""Programs that were kept on disk compute what they computed, and what they are made of is told in full."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.execution import cpu_threads, program_store
from penstock.runtime.execution.compilation import use_compilation_cache
from penstock.runtime.execution.program_store import Ahead, Kept, ProgramFiles, digest_of, load, prune, save
from tests.support.goldens import GOLDEN
from tests.support.models.compilation_cache import TEST_CACHE

DEVICES = jax.devices("cpu")[:1]


class Sums(NamedTuple):
    """A tree of JAX's, as steps have them."""

    one: Any
    other: tuple[Any, ...]


SHAPE = jax.ShapeDtypeStruct((3, 3), jnp.float32)


def lowered(factor: float) -> jax.stages.Lowered:
    def program(sums: Sums, array: jax.Array) -> Sums:
        return Sums(sums.one + factor * array, (array @ array.T, *sums.other))

    return jax.jit(program).lower(Sums(SHAPE, (SHAPE,)), SHAPE)


def check(program: jax.stages.Compiled, factor: float) -> None:
    """Compare a program with numpy."""
    array = np.arange(9, dtype=np.float32).reshape(3, 3)
    made = program(Sums(array, (array,)), array)
    assert isinstance(made, Sums)
    expected = Sums(array + np.float32(factor) * array, (array @ array.T, array))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, made), expected)


def keep(folder: Path, key: str, factors: Mapping[Any, float]) -> ProgramFiles:
    """Keep a set of programs, by their names."""
    files = ProgramFiles(folder, DEVICES)
    programs = {name: files.program(lowered(factor), None) for name, factor in factors.items()}
    save(folder, key, files.named(programs))
    return files


def program_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("program-*"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a set of two programs."""
    folder = tmp_path_factory.mktemp("programs")
    keep(folder, "key", {"one": 2.5, 2: 3.5})
    return folder


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    """Copy it, for a test that changes it."""
    return shutil.copytree(kept, tmp_path / "programs")


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Note each program that XLA compiles, or that JAX's cache has."""
    made: list[str] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            made.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield made
    jax.monitoring.unregister_event_duration_listener(note)


def test_kept_programs_compute_the_same(kept: Path) -> None:
    found = load(kept, "key", DEVICES).programs
    assert found.keys() == {"one", 2}
    check(found["one"], 2.5)
    check(found[2], 3.5)
    assert load(kept, "other", DEVICES) == Kept({}, {})


def test_a_program_that_a_file_computes_is_not_compiled(folder: Path, compilations: list[str]) -> None:
    """Another key finds it, so a change of the code compiles nothing that it leaves as it was; and the set is
    whole after that.
    """
    for _ in range(2):
        files = keep(folder, "other", {"three": 3.5, "one": 2.5})
        assert len(files.found) == 2
    found = load(folder, "other", DEVICES).programs
    check(found["one"], 2.5)
    check(found["three"], 3.5)
    assert compilations == []
    assert len(program_files(folder)) == 2
    assert keep(folder, "other", {"new": 4.5}).found == []
    assert len(compilations) == 1


def test_what_jax_s_cache_has_is_compiled_once_more_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA cannot write what it has read. JAX's cache serves again after that."""
    hits: list[str] = []

    def note(event: str, **_: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    use_compilation_cache(TEST_CACHE)
    lowered(5.5).compile()  # it has been in JAX's cache since
    jax.monitoring.register_event_listener(note)
    try:
        keep(tmp_path, "key", {"one": 5.5})
        assert hits == []
        lowered(5.5).compile()
        assert len(hits) == 1
    finally:
        jax.monitoring.unregister_event_listener(note)
    check(load(tmp_path, "key", DEVICES).programs["one"], 5.5)


def test_jax_s_cache_is_off_until_the_last_who_asks_has_ended() -> None:
    def is_on() -> bool:
        return bool(jax.config.values["jax_enable_compilation_cache"])

    cache = program_store.JAX_CACHE
    with cache.off():
        with cache.off():
            assert not is_on()
        assert not is_on()
    assert is_on()


def test_a_digest_tells_apart_what_programs_do_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second argument of one is the first of another, in modules that are alike."""

    def of(
        function: Callable[..., Any],
        *arguments: Any,
        options: dict[str, str | bool] | None = None,
        devices: int = 1,
        **given: Any,
    ) -> str:
        function.__name__ = "program"
        found = jax.jit(function, **given).lower(*(arguments or (SHAPE, SHAPE)))
        return digest_of(found, options, DEVICES * devices, program_store.compiler_facts())

    digests = [
        of(lambda a, b: a + 1),
        of(lambda a, b: b + 1),
        of(lambda a, b: a + 2),
        of(lambda a, b: a + b),
        of(lambda a, b: (a + b,) * 2),
        of(lambda a, b: a + 1, donate_argnums=0),
        of(lambda a, b: a + 1, options={"xla_cpu_enable_fast_math": True}),
        of(lambda a, b: a + 1, devices=2),
        of(lambda a: a + 1, SHAPE),
        of(lambda a: a + 1, jax.ShapeDtypeStruct((3, 4), jnp.float32)),
        of(lambda a: a + 1, jax.ShapeDtypeStruct((3, 3), jnp.float32, weak_type=True)),
    ]
    assert len(set(digests)) == len(digests)
    assert of(lambda one, two: one + 1) == digests[0], "names and lines are no part of it"
    for name, other in (("XLA_FLAGS", "--other"), ("LIBTPU_INIT_ARGS", "--other")):
        monkeypatch.setenv(name, other)
        assert of(lambda a, b: a + 1) != digests[0]
        monkeypatch.undo()
    for module, name, made in (
        (program_store, "processor", lambda: "another one"),
        (cpu_threads, "pool_size", lambda: 99),
        (cpu_threads, "allowed_processors", lambda: 99),
    ):
        monkeypatch.setattr(module, name, made)
        assert of(lambda a, b: a + 1) != digests[0], name
        monkeypatch.undo()


def test_a_program_that_calls_python_is_compiled_and_not_kept(tmp_path: Path) -> None:
    """What it calls is at an address of this process."""
    files = ProgramFiles(tmp_path, DEVICES)
    lowered = jax.jit(lambda x: jax.pure_callback(np.negative, SHAPE, x)).lower(SHAPE)
    with pytest.raises(program_store.Untold, match="calls functions of this process"):
        digest_of(lowered, None, DEVICES, "")
    program = files.program(lowered, None)
    np.testing.assert_array_equal(program(np.ones((3, 3), np.float32)), -np.ones((3, 3)))
    assert files.named({"one": program}) == {}
    assert list(tmp_path.iterdir()) == []


def test_without_knowing_what_is_called_nothing_is_told_apart() -> None:
    """JAX's names are private ones, which another version may lack."""
    for name in ("host_callbacks", "keepalive"):
        found: Any = lowered(1.5)
        del found._lowering.compile_args[name]
        with pytest.raises(program_store.Untold, match="this version of JAX"):
            digest_of(found, None, DEVICES, "")


def test_programs_of_the_start_before_are_read_ahead(folder: Path) -> None:
    """Nothing is read a second time, because the files are gone; and another key's programs are not taken."""
    keep(folder, "other", {"one": 3.5})
    files = program_files(folder)
    for key, factor in (("key", 2.5), ("other", 3.5)):
        first = Ahead(folder, "a start", DEVICES)
        assert first.take(folder, key, DEVICES) is None  # it notes what there is to read
        ahead = Ahead(folder, "a start", DEVICES)
        ahead._thread.join()
        assert Ahead(folder, "another start", DEVICES).take(folder, "three", DEVICES) is None
        (folder / f"programs-{key}").unlink()
        check(load(folder, key, DEVICES, ahead).programs["one"], factor)
        assert load(folder, key, DEVICES, ahead) == Kept({}, {})  # they are held once
    assert program_files(folder) == files


def test_a_damaged_set_is_told_where_it_was_read_ahead(
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


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "other": lambda _: b"no pickle",
    "cut": lambda data: data[:-100],
    "a bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_set_that_cannot_be_read_is_told_and_passed_over(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    file = folder / "programs-key"
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert load(folder, "key", DEVICES) == Kept({}, {})
    assert f"{file} cannot be read" in caplog.text


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_program_that_cannot_be_read_is_told_and_compiled_again(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    """The others of its set are taken."""
    (damaged,) = (file for file in program_files(folder) if file.name.endswith(digest(folder, "one")))
    whole = damaged.read_bytes()
    damaged.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        found = load(folder, "key", DEVICES)
    assert f"{damaged} cannot be read" in caplog.text
    assert found.programs.keys() == found.named.keys() == {2}
    assert keep(folder, "key", {"one": 2.5}).found == []
    check(load(folder, "key", DEVICES).programs["one"], 2.5)


def digest(folder: Path, name: str) -> str:
    """Return the digest of a program of the set "key"."""
    return load(folder, "key", DEVICES).named[name].digest


def test_files_that_were_mixed_up_are_not_taken(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each is whole, and has another's name."""
    one, two = program_files(folder)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    shutil.copy(folder / "programs-key", folder / "programs-other")
    with caplog.at_level(logging.WARNING):
        assert load(folder, "key", DEVICES) == load(folder, "other", DEVICES) == Kept({}, {})
    for file in (one, two, folder / "programs-other"):
        assert f"{file} cannot be read" in caplog.text


def test_a_program_without_a_file_is_compiled_again(folder: Path) -> None:
    (folder / f"program-{digest(folder, 'one')}").unlink()
    assert load(folder, "key", DEVICES).programs.keys() == {2}


def test_a_folder_that_can_only_be_read_serves(
    kept: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    """What it lacks is compiled, and given."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError

    before = sorted(kept.iterdir())
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    assert load(kept, "key", DEVICES).programs.keys() == {"one", 2}
    files = ProgramFiles(kept, DEVICES)
    check(files.program(lowered(2.5), None), 2.5)
    assert compilations == []
    new = files.program(lowered(6.5), None)
    check(new, 6.5)
    assert files.named({"new": new}) == {}
    save(kept, "other", {})
    prune(kept)
    assert sorted(kept.iterdir()) == before


def test_what_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no space is left")

    monkeypatch.setattr(Path, "replace", refuse)
    keep(tmp_path, "key", {"one": 2.5})
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_has_half_written_goes(tmp_path: Path) -> None:
    """That of a process that writes now stays."""
    for name, age_s in (("killed", 90_000), ("writes", 80_000)):
        (tmp_path / f".programs-{name}").write_bytes(b"half")
        then = time.time() - age_s
        os.utime(tmp_path / f".programs-{name}", (then, then))
    prune(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {".programs-writes"}


@pytest.mark.parametrize(("most", "processes"), [(2, 1), (1, 2)])
def test_the_oldest_sets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, processes: int
) -> None:
    """Of a folder that the processes of a group share, each may have so many."""
    monkeypatch.setattr(program_store, "MOST_FILES", most)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    for age, key in enumerate("abc"):
        save(tmp_path, key, {})
        os.utime(tmp_path / f"programs-{key}", (1000 + age, 1000 + age))
    prune(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"programs-b", "programs-c"}


def test_the_oldest_programs_that_no_set_names_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a set stay, also of one whose classes are not those of today."""
    named = {file.name for file in program_files(folder)}
    content = pickle.dumps((["a"], b"names and trees of another version"))
    program_store._write(folder / "programs-foreign", content)
    for age, name in enumerate("abcd"):
        (folder / f"program-{name}").write_bytes(bytes(10))
        os.utime(folder / f"program-{name}", (1000 + age, 1000 + age))
    monkeypatch.setattr(program_store, "MOST_OTHER_BYTES", 25)
    prune(folder)
    assert {file.name for file in program_files(folder)} == {*named, "program-a", "program-c", "program-d"}
    (folder / "programs-key").unlink()
    monkeypatch.setattr(program_store, "MOST_OTHER_BYTES", 0)
    prune(folder)
    assert {file.name for file in program_files(folder)} == {"program-a"}


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


def test_a_set_has_another_key_for_all_that_its_programs_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of the suite have no sets, so nothing else tells that a start would take another one's."""
    one, other, of_integers = (
        jax.device_put(np.zeros((3, size), dtype), DEVICES[0])
        for size, dtype in ((3, np.float32), (4, np.float32), (4, np.int32))
    )
    arrays = [one, other]
    key = program_store.key_of((1, "a"), arrays)
    keys = [
        key,
        program_store.key_of((2, "a"), arrays),
        program_store.key_of((1, "b"), arrays),
        program_store.key_of((1,), arrays),
        program_store.key_of((1, "a"), [other, one]),
        program_store.key_of((1, "a"), [one]),
        program_store.key_of((1, "a"), [one, of_integers]),
    ]
    changes: list[tuple[object, str, Any]] = [
        (program_store, "code_digest", lambda: b"other code"),
        (program_store, "processor", lambda: "another one"),
        (program_store, "settings", lambda: {"other": 1}),
        (jax.ffi, "ffi_call", jnp.zeros),
    ]
    for owner, name, made in changes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, made)
            keys.append(program_store.key_of((1, "a"), arrays))
    for name in ("XLA_FLAGS", "JAX_OTHER", "PENSTOCK_OTHER"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "--other")
            keys.append(program_store.key_of((1, "a"), arrays))
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert program_store.key_of((1, "a"), arrays) == key
    assert program_store.key_of((1, lambda: 0), arrays) is None


STARTS = """
import json, logging, sys
from pathlib import Path
import jax
from penstock.runtime import Engine, EngineConfig, SamplingParams, StoppingParams
from penstock.runtime.execution import program_set, program_store

model, folder, code, options = sys.argv[1], Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
config = EngineConfig(compilation_cache=folder, kv_cache_bytes=2**20, max_model_len=64, **options)
program_store.code_digest = code.encode  # a change of the code changes it
traced, compiled, lower_program = [], [], program_set.lower_program

def counted(*arguments, **options):
    traced.append(options["name"])
    return lower_program(*arguments, **options)

def note(event, _, **__):
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(event)

engine = Engine.from_pretrained(model, config)
program_set.lower_program = counted
jax.monitoring.register_event_duration_secs_listener(note)
with engine:
    found = [len(traced), len(compiled)]
    greedy, most = SamplingParams(temperature=0), StoppingParams(max_tokens=8, ignore_eos=True)
    out = engine.generate(json.loads(sys.argv[5]), sampling=greedy, stopping=most)
    assert engine.compiles_after_warmup == 0
    print(json.dumps([list(out.token_ids), *found]))
"""


@pytest.mark.ci
def test_the_next_start_traces_and_compiles_only_what_is_not_kept(tmp_path: Path) -> None:
    """After a change of the code it traces once, and compiles nothing, because all computes what it computed.
    Of an engine with other options it compiles what differs. The tokens are PyTorch's.
    """
    model = GOLDEN / "qwen3"
    case = json.loads((model / "expected.json").read_text())["cases"][0]

    def start(code: str = "", **options: Any) -> tuple[int, int]:
        sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, **options}
        arguments = [str(model), str(tmp_path), code, json.dumps(sizes), json.dumps(case["prompt"])]
        command = [sys.executable, "-c", STARTS, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        tokens, traced, compiled = json.loads(done.stdout)
        assert tokens == case["tokens"][:8]
        return traced, compiled

    number, compiled = start()
    assert compiled >= number > 1
    assert start() == (0, 0)
    assert start("other") == (number, 0)
    assert start("other") == (0, 0)
    traced, compiled = start("other", max_logprobs=3)
    assert traced == number
    assert 0 < compiled < number
