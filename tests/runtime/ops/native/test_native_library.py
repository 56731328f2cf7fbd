"""The native library as a whole: what loads it, from where, and how errors of its kernels are reported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import choose_backend
from penstock.runtime.ops.attention import paged_attention
from penstock.runtime.ops.native import build as builder
from penstock.runtime.ops.native import library, linear, sample
from penstock.runtime.ops.native.attention import native_paged_attention
from penstock.runtime.ops.native.build import BuildFailed, build
from penstock.runtime.ops.native.library import NotAvailable
from penstock.runtime.requests.sampling import FLOATS, INTS
from tests.support.native.attention import Case, Options, Shape, draw, runner

needs_kernels = pytest.mark.skipif(not library.available(), reason="no native library on this machine")
CPU = jax.devices("cpu")[0]


def weight() -> linear.Packed:
    return linear.Packed(jnp.zeros(linear.packed_shape(32, 64, int8=False), jnp.bfloat16))


def run_linear(rows: int) -> jax.Array:
    x = jnp.ones((rows, 64), jnp.bfloat16)
    return linear.linear(x, (weight(),), num_rows=jnp.int32(rows))


def run_rotate(rows: int) -> jax.Array:
    angles = jnp.ones((rows, 32), jnp.float32)
    qkv = jnp.ones((rows, 3 * 64), jnp.bfloat16)
    return linear.rotate_qkv(qkv, angles, angles, num_rows=jnp.int32(rows), num_heads=1, num_kv_heads=1)[0]


def run_sample(rows: int, vocab: int = 4096) -> jax.Array:
    zeros = jnp.zeros(rows, jnp.int32)
    tokens, _, _, _ = sample.sample(
        jnp.zeros((rows, vocab), jnp.float32),
        jnp.zeros((1, vocab), jnp.int32),
        jnp.zeros((1, vocab), jnp.float32),
        jnp.zeros((rows, vocab // 32), jnp.int32),
        jnp.zeros((rows, 2), jnp.float32),
        slots=zeros,
        features=zeros,
        ints=jnp.zeros((rows, len(INTS)), jnp.int32),
        floats=jnp.zeros((rows, len(FLOATS)), jnp.float32),
        stop_ids=jnp.zeros((rows, 1), jnp.int32),
        banned=zeros,
        num_logprobs=zeros - 1,
        num_top=1,
    )
    return tokens


def run_attention(rows: int) -> jax.Array:
    shape = Shape(heads=4, kv_heads=2, dim=64, page=16, tokens=rows, rows=rows, width=4, pages=80)
    batch = draw([Case(0, 1)] * rows, shape, Options(), 0)
    return jnp.asarray(runner(native_paged_attention, shape, Options())(batch)[0])


KERNELS = [run_linear, run_rotate, run_sample, run_attention]


@pytest.mark.parametrize("run", KERNELS)
def test_every_kernel_loads_the_library(
    run: Callable[[int], jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(folder: Path | None = None) -> None:
        raise NotAvailable("asked")

    monkeypatch.setattr(library, "load", load)
    with pytest.raises(NotAvailable, match="asked"):
        run(4)


@needs_kernels
def test_a_process_may_begin_with_a_kernel() -> None:
    code = """
import jax.numpy as jnp
from penstock.runtime.ops.native.linear import Packed, linear, packed_shape
weight = Packed(jnp.zeros(packed_shape(32, 64, int8=False), jnp.bfloat16))
print(linear(jnp.ones((4, 64), jnp.bfloat16), (weight,), num_rows=jnp.int32(4)).shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "(4, 32)\n", done.stderr


@pytest.fixture
def no_scratch() -> Iterator[None]:
    library.limit_scratch(0)
    yield
    library.limit_scratch(None)


@needs_kernels
@pytest.mark.usefixtures("no_scratch")
@pytest.mark.parametrize("run", [run_linear, run_sample, run_attention])
def test_a_kernel_without_memory_fails_its_step_and_nothing_else(run: Callable[[int], jax.Array]) -> None:
    """It used to end the process. test_native_loops tests that errors reach the caller from every thread of a
    loop.
    """
    # The kernel reports RESOURCE_EXHAUSTED, but XLA reports any error of a queued program as INTERNAL.
    with pytest.raises(jax.errors.JaxRuntimeError, match="no memory for a native kernel"):
        jax.block_until_ready(run(64))
    library.limit_scratch(None)
    assert np.isfinite(np.asarray(run(64), np.float32)).all()


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up the state of a new process. What a test loads is forgotten afterwards."""
    monkeypatch.setattr(library, "_tried", {})


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this a machine of the kind that the kernels are for, without a compiler."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr(builder, "COMPILERS", ())


@needs_kernels
def test_a_folder_with_a_library_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be read-only, as in an image. A read-only mode would not stop root from writing, so the
    test makes writing itself fail.
    """

    def read_only(**_: object) -> None:
        raise OSError("read-only file system")

    built = build()
    monkeypatch.setattr("tempfile.TemporaryDirectory", read_only)
    with pytest.raises(BuildFailed, match=r"cannot write to .*read-only file system"):
        build(tmp_path)
    (tmp_path / built.name).symlink_to(built)
    monkeypatch.setattr(builder, "COMPILERS", ())
    assert build(tmp_path) == tmp_path / built.name
    with pytest.raises(BuildFailed, match=rf"{built.name} is not there, and no C\+\+ compiler"):
        build(tmp_path / "other")


@needs_kernels
def test_the_library_of_a_wheel_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves where no folder is named. A named folder is where the operator wants the library to be."""
    built = build()
    shipped, empty = tmp_path / "shipped", tmp_path / "empty"
    shipped.mkdir()
    (shipped / built.name).symlink_to(built)
    monkeypatch.setattr(builder, "SHIPPED", shipped)
    monkeypatch.setattr(builder, "default_folder", lambda: empty)
    monkeypatch.setattr(builder, "COMPILERS", ())
    monkeypatch.setattr(library, "_tried", {})
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *args, **kwargs: None)  # XLA has them already
    assert build() == shipped / built.name
    assert library.load()._name == str(shipped / built.name)
    with pytest.raises(BuildFailed, match=rf"{empty / built.name} is not there, and no C"):
        build(empty)


def test_a_library_is_for_the_headers_that_it_was_compiled_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A jaxlib with other headers may have another binary interface."""
    before = builder.KERNELS.digest()
    headers = tmp_path / "include"
    shutil.copytree(jax.ffi.include_dir(), headers)
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(headers))
    assert builder.KERNELS.digest() == before
    with (headers / "xla" / "ffi" / "api" / "c_api.h").open("a") as header:
        header.write("// another interface\n")
    assert builder.KERNELS.digest() != before


@pytest.mark.ci
def test_of_two_processes_that_need_the_library_one_compiles(tmp_path: Path) -> None:
    """The compiler waits until the other process has come: it opens the file of the lock just before it waits
    for it.
    """
    folder, compiler, runs = tmp_path / "native", tmp_path / "c++", tmp_path / "runs"
    library = folder / builder.KERNELS.file_name()
    lock = library.parent
    compiler.write_text(
        f"""#!/bin/sh
for last; do :; done
case "$*" in
*-shared*)
  echo . >>{runs}
  for _ in $(seq 300); do
    [ "$(ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c '{lock}$')" -lt 2 ] || break
    sleep 0.2
  done
esac
while [ "$1" != -o ]; do shift; done
: >"$2"
"""
    )
    compiler.chmod(0o755)
    code = f"""
from pathlib import Path
from penstock.runtime.ops.native import build
build.COMPILERS = ({str(compiler)!r},)
build.platform.machine, build.platform.system = lambda: "x86_64", lambda: "Linux"
print(build.build(Path({str(folder)!r})))
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0] for process in processes] == [f"{library}\n"] * 2
    assert runs.read_text() == ".\n"


@pytest.mark.usefixtures("nothing_loaded", "no_compiler")
def test_why_there_are_no_kernels_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert not library.available(tmp_path)
        with pytest.raises(NotAvailable, match="no C"):
            library.load(tmp_path)
    assert len([record for record in caplog.records if "no native kernels" in record.message]) == 1


@needs_kernels
@pytest.mark.usefixtures("nothing_loaded")
def test_one_folder_may_fail_and_another_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compilers = builder.COMPILERS
    monkeypatch.setattr(builder, "COMPILERS", ())
    assert not library.available(tmp_path)
    monkeypatch.setattr(builder, "COMPILERS", compilers)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *args, **kwargs: None)  # XLA has them already
    loaded = library.load()
    assert library.load(tmp_path) is loaded  # a process has one library


@pytest.mark.usefixtures("nothing_loaded", "no_compiler")
def test_kernels_that_are_required_must_be_there(tmp_path: Path) -> None:
    backend = choose_backend(EngineConfig(native_folder=tmp_path), CPU)
    assert backend.attention is paged_attention
    assert backend.packed_dtype is None
    with pytest.raises(ConfigError, match=r"^native: the kernels are required.*no C\+\+ compiler"):
        choose_backend(EngineConfig(native="require", native_folder=tmp_path), CPU)


@pytest.mark.usefixtures("no_compiler")
def test_only_a_build_for_an_image_fails_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builder, "default_folder", lambda: tmp_path)
    assert builder.main([]) == 0
    assert builder.main(["--folder", str(tmp_path)]) == 1
    assert "no C++ compiler" in capsys.readouterr().err
