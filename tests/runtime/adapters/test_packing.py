"""Where the numbers of an adapter lie that native code packs, and what it refuses, against the definition of
the layout; and that numpy's form, which serves without native kernels, makes the same bits. Also its
digest, and what is written to its slot.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.runtime.adapters.packing import Packer, Part, Tensors
from penstock.runtime.errors import AdapterFormatError
from penstock.runtime.loading.safetensors_files import TensorEntry
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.adapter_packing import native_write_row
from penstock.runtime.ops.native.hashing import digest_of_values
from penstock.runtime.requests.adapter import AdapterValues

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)]
MOST_RANK = 18
"""Of the place. Smaller ranks leave zeros between the rows. Native code moves 8 ranks, or pairs of ranks, at
once, and the rest one by one."""
Matrices = dict[str, NDArray[Any]]


def part(name: str, rank: int, begin: int, taken: slice, scaling: float = 1.0, device: int = 0) -> Part:
    """Make a part that lies packed."""
    is_b = name == "B"
    width = MOST_RANK * (16 if is_b else 2)
    return Part(name, device, begin, width, is_b, True, rank, scaling, taken)


def packer(parts: list[Part], tensors: Matrices, devices: int, size: int) -> Packer:
    described = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    return Packer(parts, described, devices, size, BFLOAT16)


def in_file(folder: Path, tensors: Matrices) -> tuple[int, dict[str, TensorEntry]]:
    """Write tensors one behind the other, after a byte, and open the file."""
    file, data, entries = folder / "tensors", b"x", dict[str, TensorEntry]()
    for name, tensor in tensors.items():
        entries[name] = TensorEntry(file, len(data), tensor.dtype, tensor.shape)
        data += tensor.tobytes()
    file.write_bytes(data)
    return os.open(file, os.O_RDONLY), entries


def defined(parts: list[Part], tensors: Matrices, devices: int, size: int) -> NDArray[Any]:
    """Place each number as `ops.adapters` says: A [in / 2, rank, 2], and B [out / 16, rank / 2, 16, 2]."""
    values = np.zeros((devices, size), BFLOAT16)
    for each in parts:
        with np.errstate(over="ignore"):
            scaled = tensors[each.tensor].astype(np.float32) * np.float32(each.scaling)
        assert isinstance(each.taken, slice)
        number, first = np.arange(each.count), each.taken.start
        for rank in range(each.rank):
            if each.is_b:
                own = scaled[first : first + each.count, rank]
                at = number // 16 * each.width + rank // 2 * 32 + number % 16 * 2 + rank % 2
            else:
                own = scaled[rank, first : first + each.count]
                at = number // 2 * each.width + rank * 2 + number % 2
            values[each.device, each.begin + at] = own.astype(BFLOAT16)
    return values if devices > 1 else values[0]


def drawn(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Draw numbers of all sizes that a dtype has, zeros and the smallest ones too."""
    exponents = rng.integers(-24, 15, shape) if dtype == np.float16 else rng.integers(-140, 120, shape)
    values = rng.standard_normal(shape) * 2.0**exponents * (rng.random(shape) > 0.05)
    return values.astype(np.float32).astype(dtype)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(1, MOST_RANK),
    st.sampled_from([1.0, 2.0, 0.3, -1e-3]),
    st.tuples(st.integers(0, 3), st.integers(1, 20)),
    st.tuples(st.integers(0, 20), st.integers(1, 3)),
    st.sampled_from([1, 2]),
)
def test_packed_numbers_lie_where_kernels_read_them(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    of_a: np.dtype[Any],
    of_b: np.dtype[Any],
    rank: int,
    scaling: float,
    inputs: tuple[int, int],
    blocks: tuple[int, int],
    devices: int,
) -> None:
    """A part begins anywhere in its tensor, and two parts of one tensor may be on two devices. Where much of
    the place stays free, the adapter is kept without its zeros.
    """
    rng, (in_first, pairs), (out_first, num_blocks) = np.random.default_rng(seed), inputs, blocks
    tensors = {
        "A": drawn(rng, (rank, in_first + 2 * pairs), of_a),
        "B": drawn(rng, (out_first + 16 * num_blocks + 1, rank), of_b),
    }
    behind_a = pairs * 2 * MOST_RANK
    size = behind_a + num_blocks * 16 * MOST_RANK
    parts = [
        part("A", rank, 0, slice(in_first, in_first + 2 * pairs)),
        part("B", rank, behind_a, slice(out_first, out_first + 16 * num_blocks), scaling),
        part("B", rank, behind_a, slice(0, 16), scaling, device=1),
    ][: 1 + devices]
    expected = defined(parts, tensors, devices, size)
    pack = packer(parts, tensors, devices, size).pack
    made = pack(Tensors.in_memory(tensors))
    descriptor, entries = in_file(tmp_path_factory.mktemp("packed"), tensors)
    try:
        read = pack(Tensors.in_file(descriptor, entries))
    finally:
        os.close(descriptor)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(library, "loaded", lambda: None)
        by_numpy = packer(parts, tensors, devices, size).pack(Tensors.in_memory(tensors))
    for values in (made, read, by_numpy):
        assert values.whole().tobytes() == expected.tobytes()


def test_arrays_of_another_order_in_memory() -> None:
    tensor = np.arange(96, dtype=np.float32).reshape(3, 32).T
    expected = of_one(np.ascontiguousarray(tensor)).whole().tobytes()
    assert of_one(tensor).whole().tobytes() == expected
    assert of_one(tensor.astype(">f4")).whole().tobytes() == expected


def test_an_array_may_be_several_tensors() -> None:
    """Each has a scaling of its own, as layers have that a pattern of alphas tells apart."""
    array = np.arange(48, dtype=np.float32).reshape(16, 3)
    tensors = {"first.B": array, "second.B": array}
    parts = [
        Part(name, 0, begin, 16 * MOST_RANK, True, True, 3, scaling, slice(0, 16))
        for name, begin, scaling in (("first.B", 0, 1.0), ("second.B", 16 * MOST_RANK, 0.5))
    ]
    made = packer(parts, tensors, 1, 32 * MOST_RANK).pack(Tensors.in_memory(tensors)).whole()
    assert made.tobytes() == defined(parts, tensors, 1, 32 * MOST_RANK).tobytes()


def test_an_engine_without_the_kernels_compiles_none_for_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same bits and the same digest."""
    tensor = np.arange(96, dtype=np.float32).reshape(32, 3)
    expected = of_one(tensor).whole()
    digest = digest_of_values(expected)
    monkeypatch.setattr(library, "_tried", {})
    monkeypatch.setattr(library, "load", lambda *_: pytest.fail("the library is looked for, or compiled"))
    assert of_one(tensor).whole().tobytes() == expected.tobytes()
    assert digest_of_values(expected) == digest


def of_one(tensor: NDArray[Any], scaling: float = 1.0) -> AdapterValues:
    """Pack 32 outputs of a B of rank 3."""
    parts = [part("B", 3, 0, slice(0, 32), scaling)]
    return packer(parts, {"B": tensor}, 1, 32 * MOST_RANK).pack(Tensors.in_memory({"B": tensor}))


@pytest.mark.parametrize("at", [0, 7, 50, 95])  # the last ones are of no whole register
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", [1.0, 0.5, 0.0])
def test_a_number_that_is_none_is_found_anywhere(at: int, dtype: np.dtype[Any], scaling: float) -> None:
    for wrong in (np.nan, np.inf, -np.inf):
        tensor = np.ones((32, 3), dtype)
        tensor.flat[at] = wrong
        with pytest.raises(AdapterFormatError, match="NaN or infinity") as caught:
            of_one(tensor, scaling)
        assert caught.value.tensor == "B"


@pytest.mark.parametrize("at", [0, 95])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_that_the_scaling_makes_too_large(at: int, dtype: np.dtype[Any]) -> None:
    tensor = np.ones((32, 3), dtype)
    tensor.flat[at] = 4
    of_one(tensor, 8e37)  # 3.2e38, and the largest bfloat16 is 3.39e38
    with pytest.raises(AdapterFormatError, match="too large for bfloat16"):
        of_one(tensor, 9e37)
    with pytest.raises(AdapterFormatError, match="too large for bfloat16"):
        of_one(tensor, 1e300)
    rounded_up = np.full((32, 3), 1, np.float32)
    rounded_up.flat[at] = np.float32(3.398e38)  # a number of float32 that rounds to infinity
    with pytest.raises(AdapterFormatError, match="too large for bfloat16"):
        of_one(rounded_up)


def test_a_file_that_becomes_shorter_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    tensors: Matrices = {"A": np.ones((3, 4), BFLOAT16), "B": np.ones((16, 3), BFLOAT16)}
    parts = [part("A", 3, 0, slice(0, 4)), part("B", 3, 4 * MOST_RANK, slice(0, 16))]
    descriptor, entries = in_file(tmp_path, tensors)
    pack = packer(parts, tensors, 1, 20 * MOST_RANK).pack
    try:
        os.truncate(tmp_path / "tensors", 1 + 24 + 95)
        with pytest.raises(AdapterFormatError, match="became shorter") as caught:
            pack(Tensors.in_file(descriptor, entries))
        assert caught.value.tensor == "B"
    finally:
        os.close(descriptor)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            pack(Tensors.in_file(folder, entries))
    finally:
        os.close(folder)


@pytest.mark.parametrize("num_bytes", [0, 1, 16384, 16385, 16 * 16384, 49 * 16384 + 7])
def test_the_digest_is_that_of_the_digests_of_its_pieces(num_bytes: int) -> None:
    data = np.random.default_rng(num_bytes).bytes(num_bytes)
    pieces = (data[begin : begin + 16384] for begin in range(0, num_bytes, 16384))
    expected = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()
    values = np.frombuffer(data, np.uint8)
    assert digest_of_values(values) == expected
    library.limit_isa(library.Isa.AVX2)
    try:
        assert digest_of_values(values) == expected
    finally:
        library.limit_isa(library.Isa.AMX)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
def test_an_adapter_is_written_to_its_slot_and_nowhere_else(dtype: np.dtype[Any]) -> None:
    """It has more than a megabyte, which is what a thread copies at a time."""
    rng, size = np.random.default_rng(0), 600_001
    expected = rng.standard_normal((3, size)).astype(dtype)
    write = jax.jit(native_write_row, donate_argnums=0)
    pool = write(jax.device_put(expected), np.int32(0), expected[0])
    jax.block_until_ready(pool)  # from here on JAX has its own memory
    memory = pool.unsafe_buffer_pointer()
    for slot, at in ((1, 1), (2, 2), (7, 2), (-1, 0)):  # as with XLA, the nearest slot that there is
        values = rng.standard_normal(size).astype(dtype)
        expected[at] = values
        pool = write(pool, np.int32(slot), values)
        assert pool.unsafe_buffer_pointer() == memory
    assert np.asarray(pool).tobytes() == expected.tobytes()
    kept = jax.jit(native_write_row)(pool, np.int32(1), np.ones(size, dtype))  # into other memory
    assert np.asarray(pool).tobytes() == expected.tobytes()
    expected[1] = 1
    assert np.asarray(kept).tobytes() == expected.tobytes()
    with pytest.raises(Exception, match="no row of the array"):
        jax.block_until_ready(write(kept, np.int32(1), np.ones(size - 1, dtype)))
