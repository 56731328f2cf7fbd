"""AVX-512 in plain C++ (tests/support/native/emulated), in which tests run the kernels for AVX-512: on values
whose results were found by hand from Intel's manual. Where the processor has the instructions, they are held
to the same results.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from penstock.runtime.ops.native import build, library
from penstock.runtime.ops.native.library import Isa
from tests.support.native.kernels import EMULATED_FLAGS, EMULATED_SOURCES, TEST_KERNELS

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")

NAN, INF = np.nan, np.inf
MAX, MIN = 2**31 - 1, -(2**31)

Call = Callable[..., np.ndarray]


@pytest.fixture(scope="module", params=["emulated", "real"])
def call(request: pytest.FixtureRequest) -> Call:
    """(name, a, b, c, mask=...) -> the 64 bytes of the result. Operands are arrays, or lists of float32 or
    int32, and zeros behind their end.
    """
    real = request.param == "real"
    if real and library.load().penstock_best_isa() < Isa.AVX512_BF16:
        pytest.skip("this processor has no AVX512_BF16")
    source = EMULATED_SOURCES / "intrinsics_avx512_bf16.cc"
    flags = build.FLAGS if real else EMULATED_FLAGS
    opened = ctypes.CDLL(
        str(build.build(TEST_KERNELS, build.Recipe(f"intrinsics-{request.param}", (source,), flags)))
    )

    def register(values: Any) -> np.ndarray:
        if not isinstance(values, np.ndarray):
            kind = np.int32 if all(isinstance(value, int) for value in values) else np.float32
            values = np.asarray(values, kind)
        return np.frombuffer(values.tobytes().ljust(64, b"\0"), np.uint8)

    def run(name: str, *operands: Any, mask: int = 0) -> np.ndarray:
        out = np.zeros(64, np.uint8)
        given = [register(values) for values in (*operands, [0], [0], [0])[:3]]
        assert opened.call(name.encode(), *(x.ctypes.data_as(ctypes.c_void_p) for x in (*given, out)), mask)
        return out

    run.by_address = opened.call  # type: ignore[attr-defined]
    return run


def floats(result: np.ndarray, count: int) -> np.ndarray:
    return result.view(np.float32)[:count]


def ints(result: np.ndarray, count: int = 16) -> list[int]:
    found: list[int] = result.view(np.int32)[:count].tolist()
    return found


def same(result: np.ndarray, expected: Iterable[float]) -> None:
    """Check for the same numbers, with the sign of zeros; NaN is like any other NaN."""
    wanted = np.asarray(list(expected), np.float32)
    got = floats(result, len(wanted))
    np.testing.assert_array_equal(got, wanted)
    zero = wanted == 0
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(wanted[zero]))


def mask_of(result: np.ndarray) -> int:
    return int(result.view(np.uint16)[0])


def test_every_intrinsic_of_the_kernels_is_emulated() -> None:
    """What is missing does not compile, but only sweeps compile the kernels for AVX-512 alone."""
    text = "".join(file.read_text() for file in build.SOURCES.rglob("*") if file.suffix in (".h", ".cc"))
    headers = "".join(file.read_text() for file in EMULATED_SOURCES.glob("avx512*.h"))
    used = set(re.findall(r"\b_mm512_\w+", text))
    defined = set(re.findall(r"\b(_mm512_\w+)\(", headers))
    assert len(used) > 40
    assert used <= defined


def test_max_and_min_give_the_second_operand_for_nan_and_for_zeros(call: Call) -> None:
    a, b = [NAN, 1.0, 0.0, -0.0, -INF, 2.0], [1.0, NAN, -0.0, 0.0, -3.0, 1.0]
    same(call("max_ps", a, b), [1.0, NAN, -0.0, 0.0, -3.0, 2.0])
    same(call("min_ps", a, b), [1.0, NAN, -0.0, 0.0, -INF, 1.0])
    same(call("abs_ps", [-0.0, -INF, -2.5]), [0.0, INF, 2.5])


def test_multiply_and_add_round_once(call: Call) -> None:
    """(1 + 2^-12)^2 - 1 = 2^-11 + 2^-24, whose last bit is lost if the product is rounded."""
    x = 1 + 2.0**-12
    same(call("fmadd_ps", [x, INF], [x, 0.0], [-1.0, 1.0]), [2.0**-11 + 2.0**-24, NAN])
    same(call("fnmadd_ps", [x, 2.0], [x, 3.0], [1.0, 1.0]), [-(2.0**-11) - 2.0**-24, -5.0])


def test_rounding_goes_to_the_even_integer_and_keeps_the_sign(call: Call) -> None:
    x = [0.5, 1.5, 2.5, -0.5, -1.5, -0.3, 0.49999997, 8388609.0, 3e30, INF, -INF, NAN, -0.0]
    same(call("roundscale_ps", x), [0, 2, 2, -0.0, -2, -0.0, 0, 8388609.0, 3e30, INF, -INF, NAN, -0.0])
    same(call("reduce_ps", x), [0.5, -0.5, 0.5, -0.5, 0.5, -0.3, 0.49999997, 0, 0, 0, 0, NAN, 0])


def test_scaling_by_powers_of_two(call: Call) -> None:
    """The exponent is rounded down; with infinities it has cases of its own."""
    same(
        call("scalef_ps", [3.0, 3.0, 3.0, -3.0, 1.0], [2.9, -0.1, -1.5, 1.0, -149.0]),
        [12, 1.5, 0.75, -6, 2.0**-149],
    )
    same(
        call("scalef_ps", [1.5, 1.25, 2.0**-149, 1.0, 5.0], [-149.0, -149.0, 276.0, 128.0, -1e30]),
        [2.0**-148, 2.0**-149, 2.0**127, INF, 0.0],
    )
    same(
        call("scalef_ps", [-2.0, -2.0, 0.0, INF, -INF, 0.0, INF], [INF, -INF, INF, -INF, INF, -INF, -9.0]),
        [-INF, -0.0, NAN, NAN, -INF, 0.0, INF],
    )
    same(call("scalef_ps", [NAN, NAN, NAN, 1.0], [INF, -INF, 3.0, NAN]), [INF, 0.0, NAN, NAN])


def test_sums_over_lanes_fold_halves(call: Call) -> None:
    """As a chain, 1 would be lost beside 2^24 before -2^24 is added; by halves, lanes 0 and 8 go first."""
    x = np.zeros(16, np.float32)
    x[0], x[8], x[1] = 2.0**24, -(2.0**24), 1.0
    same(call("reduce_add_ps", x), [1.0])
    x = np.zeros(16, np.float32)
    x[0], x[1], x[2] = 2.0**24, -(2.0**24), 1.0  # lanes 0 and 2 go before lanes 0 and 1: a tie, to even
    same(call("reduce_add_ps", x), [0.0])
    same(call("reduce_max_ps", [float(i % 11) - 20 for i in range(16)]), [-10.0])
    assert ints(call("reduce_max_epi32", [MIN, -5, 7, MAX] + [MIN] * 12), 1) == [MAX]


def test_integers_wrap_around(call: Call) -> None:
    assert ints(call("add_epi32", [MAX, -1], [1, 1]), 2) == [MIN, 0]
    assert ints(call("max_epi32", [-1, MIN], [1, MAX]), 2) == [1, MAX]
    assert ints(call("slli_epi32", [1, 2, 3]), 3) == [MIN, 0, MIN]
    assert ints(call("srli_epi32", [-1, MAX]), 2) == [1, 0]


def test_bytes_without_and_with_sign_are_multiplied(call: Call) -> None:
    """255 * -128 * 4 fits 32 bits but not 16; nothing saturates."""
    a = np.array([[255] * 4, [255, 0, 0, 0], [1, 2, 3, 4], [255] * 4], np.uint8)
    b = np.array([[-128] * 4, [-1, 9, 9, 9], [10, -10, 1, -1], [127] * 4], np.int8)
    assert ints(call("dpbusd_epi32", a, b, [0, 5, 0, MAX]), 4) == [-130560, -250, -11, MIN + 129540 - 1]


def test_bytes_are_found_by_their_places(call: Call) -> None:
    """Each 16 bytes have a table of their own; above 127 a place stands for 0."""
    tables = np.arange(64, dtype=np.uint8) + np.uint8(100)
    places = np.zeros(64, np.uint8)
    places[[0, 15, 16, 17, 63]] = [15, 0x7F, 3, 0x80, 0x1E]
    found = call("shuffle_epi8", tables, places)
    assert found[[0, 15, 16, 17, 63]].tolist() == [115, 115, 119, 0, 162]
    assert found[1:15].tolist() == [100] * 14
    assert call("broadcast_i32x4", tables).tolist() == list(range(100, 116)) * 4


def test_halves_with_sign_are_multiplied(call: Call) -> None:
    """Both products of -2^15 by itself fit no word; the sum wraps around, it does not saturate."""
    a = np.array([[-(2**15)] * 2, [3, -4], [2**15 - 1] * 2, [1, 0]], np.int16)
    b = np.array([[-(2**15)] * 2, [100, 10], [2**15 - 1] * 2, [1, 0]], np.int16)
    expected = [MIN, 265, 2 * (2**15 - 1) ** 2, MIN]
    assert ints(call("dpwssd_epi32", a, b, [0, 5, 0, MAX]), 4) == expected


def test_conversions(call: Call) -> None:
    bytes_ = np.array([-128, 127, *[0] * 29, -1], np.int8)
    assert call("cvtepi8_epi16", bytes_).view(np.int16).tolist() == [-128, 127, *[0] * 29, -1]
    assert ints(call("cvtepu16_epi32", np.array([65535, 1], np.uint16)), 2) == [65535, 1]
    assert ints(call("cvtepi8_epi32", np.array([-128, 127], np.int8)), 2) == [-128, 127]
    narrow = call("cvtepi32_epi16", [0x12345678, -1, 32768])
    assert narrow.view(np.uint16)[:3].tolist() == [
        0x5678,
        0xFFFF,
        0x8000,
    ]  # the low bits, not the nearest number
    assert call("cvtepi32_epi8", [0x123456F8, 128, -129]).view(np.int8)[:3].tolist() == [-8, -128, 127]
    halves = [1.5, 2.0**-24, -INF, *[0.0] * 12, -0.0]
    same(call("cvtph_ps", np.array(halves, np.float16)), halves)
    same(call("cvtepi32_ps", [2**24 + 1, 2**24 + 3, -7]), [2.0**24, 2.0**24 + 4, -7.0])
    wide = [0.5, 1.5, -2.5, 2147483520.0, 2147483648.0, -2147483648.0, NAN, -INF]
    assert ints(call("cvtps_epi32", wide), 8) == [0, 2, -2, 2147483520, MIN, MIN, MIN, MIN]


def test_comparisons_with_nan(call: Call) -> None:
    a, b = [1.0, NAN, 1.0, 0.0, 2.0] + [5.0] * 11, [1.0, NAN, NAN, -0.0, 3.0] + [4.0] * 11
    assert mask_of(call("cmp_eq", a, b)) == 0b01001
    assert mask_of(call("cmp_lt", a, b)) == 0b10000
    assert mask_of(call("cmp_le", a, b)) == 0b11001
    assert mask_of(call("cmp_unord", a, b)) == 0b00110
    assert mask_of(call("cmple_epi32_mask", [-1, 3, 2] + [9] * 13, [0, 3, 1])) == 0b011
    assert (
        mask_of(call("test_epi32_mask", [1, 6, 4] + [0] * 12 + [MIN], [2, 2, 4] + [0] * 12 + [-1])) == 0x8006
    )


def test_masks_choose_lanes(call: Call) -> None:
    a, b = list(range(16)), list(range(100, 116))
    assert ints(call("mask_mov_epi32", a, b, mask=0x8001)) == [100, *range(1, 15), 115]
    assert ints(call("mask_or_epi32", a, [1] * 16, [6] * 16, mask=2), 3) == [0, 7, 2]
    assert ints(call("mask_storeu_epi32", b, mask=0x4002)) == [0, 101, *[0] * 12, 114, 0]
    same(call("mask_blend_ps", [1.0, 2.0], [3.0, 4.0], mask=2), [1.0, 4.0])
    wide = [float(x) for x in b]
    same(call("maskz_compress_ps", wide, mask=0x9022), [101.0, 105.0, 112.0, 115.0] + [0.0] * 12)


@pytest.mark.parametrize("name", ["mask_loadu_ps", "maskz_loadu_epi32"])
def test_masked_loads_leave_the_other_memory_alone(call: Call, name: str) -> None:
    """Three words lie before the end of the memory that may be read."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(begin + page), ctypes.c_size_t(page), 0) == 0
    memory[page - 12 : page] = np.array([5, 6, 7], np.int32).tobytes()
    others, out = np.full(16, 9, np.int32), np.zeros(16, np.int32)
    at = [
        ctypes.c_void_p(x)
        for x in (others.ctypes.data, begin + page - 12, others.ctypes.data, out.ctypes.data)
    ]
    assert call.by_address(name.encode(), *at, 0b101)  # type: ignore[attr-defined]
    rest = 9 if name == "mask_loadu_ps" else 0
    assert out.tolist() == [5, rest, 7, *[rest] * 13]


def test_permutations(call: Call) -> None:
    a, b = list(range(16)), list(range(100, 116))
    assert ints(call("castsi512_si256", a), 8) == a[:8]
    assert ints(call("extracti64x4_epi64", a), 8) == a[8:]
    blocks = lambda words: [word for four in range(0, 16, 4) for word in words(four)]
    assert ints(call("unpacklo_epi32", a, b)) == blocks(lambda i: [i, 100 + i, i + 1, 101 + i])
    assert ints(call("unpackhi_epi32", a, b)) == blocks(lambda i: [i + 2, 102 + i, i + 3, 103 + i])
    assert ints(call("unpacklo_epi64", a, b)) == blocks(lambda i: [i, i + 1, 100 + i, 101 + i])
    assert ints(call("unpackhi_epi64", a, b)) == blocks(lambda i: [i + 2, i + 3, 102 + i, 103 + i])
    halves = [np.arange(first, first + 32, dtype=np.uint16) for first in (0, 100)]
    in_turns = lambda at: [
        x for block in range(at, 32, 8) for i in range(4) for x in (block + i, 100 + block + i)
    ]
    assert call("unpacklo_epi16", *halves).view(np.uint16).tolist() == in_turns(0)
    assert call("unpackhi_epi16", *halves).view(np.uint16).tolist() == in_turns(4)
    # 0x1b: blocks 3 and 2 of a, then 1 and 0 of b.
    assert ints(call("shuffle_i32x4", a, b)) == [
        *range(12, 16),
        *range(8, 12),
        *range(104, 108),
        *range(100, 104),
    ]
    which = [0, 16, 15, 31, 32, -1] + [0] * 10  # only five bits count
    wide = call("permutex2var_ps", [float(x) for x in a], which, [float(x) for x in b])
    same(wide, [0.0, 100.0, 15.0, 115.0, 0.0, 115.0])
    which16 = np.array([31, 0, 33, 16] + [0] * 28, np.uint16)
    mixed = call("permutexvar_epi16", which16, np.arange(200, 232, dtype=np.uint16))
    assert mixed.view(np.uint16)[:4].tolist() == [231, 200, 201, 216]


def bits(*values: int) -> np.ndarray:
    return np.array(values, np.uint32).view(np.float32)


def test_narrowing_to_bf16(call: Call) -> None:
    """Ties go to even, denormals become zero; a NaN whose upper bits alone would be infinity stays NaN."""
    x = bits(0x3F808000, 0x3F818000, 0x3F808001, 0x007FFFFF, 0x80000001, 0x7F800001, 0x7F7FFFFF, 0xFF800000)
    expected = [0x3F80, 0x3F82, 0x3F81, 0x0000, 0x8000, 0x7FC0, 0x7F80, 0xFF80]
    assert call("cvtneps_pbh", x).view(np.uint16)[:8].tolist() == expected
    both = call("cvtne2ps_pbh", [1.0] * 16, x).view(np.uint16)
    assert both.tolist() == expected + [0] * 8 + [0x3F80] * 16


def test_products_of_pairs(call: Call) -> None:
    """Odd elements are added before even ones, each with one rounding to nearest even; denormals count as
    zero, and become zero.
    """

    def pairs(*values: tuple[float, float]) -> np.ndarray:
        upper = np.asarray(values, np.float32).view(np.uint32) >> 16
        return upper.astype(np.uint16)

    one = (1.0, 1.0)
    # Lanes are (even, odd). 1 is lost beside 2^24, where it is half of the last bit: a tie, to even.
    a = pairs((-(2.0**24), 1.0), (1.0, -(2.0**24)), one, one, (NAN, 1.0))
    same(
        call("dpbf16_ps", a, pairs(one, one, one, one, one), [2.0**24] * 3 + [-2.0, 1.0]),
        [0, 1, 2.0**24, 0, NAN],
    )
    a, b = pairs((2.0**-127, 0), (2.0**-70, 0), (0, 0)), pairs((2.0**20, 0), (-(2.0**-70), 0), (0, 0))
    same(call("dpbf16_ps", a, b, [0.0, 2.0**-126, 2.0**-127]), [0.0, 0.0, 0.0])
    same(call("dpbf16_ps", pairs((2.0**-63, 0)), pairs((2.0**-64, 0)), [0.0]), [0.0])
