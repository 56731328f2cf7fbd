"""The constants that the sampler in C++ shares with its callers equal those of `sampling_codes`."""

from __future__ import annotations

import re

from penstock.runtime.ops import sampling_codes
from penstock.runtime.ops.native.build import SOURCES
from penstock.runtime.requests.sampling import FLOATS, INTS


def test_both_files_have_the_same_numbers() -> None:
    header = (SOURCES / "sample" / "sample_codes.h").read_text(encoding="utf-8")
    found = {name: int(number) for name, number in re.findall(r"constexpr \w+ k(\w+) = (-?\d+);", header)}
    expected = {
        "Penalties": sampling_codes.PENALTIES,
        "Bias": sampling_codes.BIAS,
        "Mask": sampling_codes.MASK,
        "InPromptBit": sampling_codes.IN_PROMPT.bit_length() - 1,
        "NonFinite": sampling_codes.NON_FINITE,
    }
    assert sampling_codes.IN_PROMPT.bit_count() == 1
    assert found == expected
    columns = {end: names.split() for names, end in re.findall(r"{\s*((?:k\w+,\s+)+)k(Sample\w+)", header)}
    assert {end: [_snake(name) for name in names] for end, names in columns.items()} == {
        "SampleFloats": list(FLOATS),
        "SampleInts": list(INTS),
    }


def _snake(name: str) -> str:
    """kTopP, -> top_p"""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip("k,")).lower()
