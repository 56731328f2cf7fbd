"""The header of GGUF files: right ones are read, and nothing that lies does harm."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.gguf.file import read_gguf
from tests.support.gguf_bytes import Typed, header, padded, tensor, text, typed

_KEYS: Mapping[str, Typed] = {
    "general.architecture": typed("llama"),
    "general.alignment": typed(64),
    "llama.rope.freq_base": typed(500000.0),
    "tokenizer.ggml.tokens": typed(["a", "é", ""]),
    "tokenizer.ggml.token_type": typed([1, 2, 3]),
    "some.truths": typed([True, False]),
    "some.none": (9, struct.pack("<IQ", 8, 0)),
    "some.negative": (11, struct.pack("<q", -(1 << 40))),
}
_TENSORS = [tensor("one", (2, 64), 8, 0), tensor("two", (3,), 0, 192)]
_DATA = padded(bytes(range(136)), 64) + np.array([1.5, -2, 3], np.float32).tobytes()
_FILE = padded(header(_KEYS, _TENSORS), 64) + _DATA
_MOST_BYTES = 1 << 18
"""What reading a header of a kilobyte may take at a time."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def _refused(path: Path, data: bytes) -> str:
    """Return what is said about a file that must be refused; it must not take much memory to find out."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as raised:
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < _MOST_BYTES
    finally:
        tracemalloc.stop()
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_a_header_is_read(path: Path) -> None:
    path.write_bytes(_FILE)
    found = read_gguf(path)
    assert found.metadata == {
        "general.architecture": "llama",
        "general.alignment": 64,
        "llama.rope.freq_base": 500000.0,
        "tokenizer.ggml.tokens": ["a", "é", ""],
        "tokenizer.ggml.token_type": [1, 2, 3],
        "some.truths": [True, False],
        "some.none": [],
        "some.negative": -(1 << 40),
    }
    one, two = found.tensors["one"], found.tensors["two"]
    assert (one.shape, one.type.name, one.row_bytes, one.num_rows) == ((2, 64), "Q8_0", 68, 2)
    assert one.blocks(1, 2).tobytes() == bytes(range(68, 136))
    np.testing.assert_array_equal(two.type.read(two.blocks(0, 1)), [[1.5, -2, 3]])


_HUGE = (1 << 64) - 1
_LIES = {
    "no magic": (b"GGML" + _FILE[4:], "GGUF"),
    "nothing": (b"", "GGUF"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    "version 1": (header({}, version=1), "version is 1"),
    "big-endian": (header({}, version=3 << 24), "big-endian"),
    "number of keys": (header(_KEYS, num_keys=_HUGE), f"{_HUGE} keys"),
    "number of tensors": (header(_KEYS, _TENSORS, num_tensors=_HUGE), f"{_HUGE} tensors"),
    "length of a name": (header({}, num_keys=1) + struct.pack("<Q", 1 << 40) + bytes(99), "key 0"),
    "length of a text": (header({"some.text": (8, struct.pack("<Q", _HUGE))}), "some.text"),
    "texts of an array": (header({"some.list": (9, struct.pack("<IQ", 8, _HUGE))}), "some.list"),
    "numbers of an array": (header({"some.list": (9, struct.pack("<IQ", 0, 1 << 40))}), "some.list"),
    "arrays of arrays": (header({"some.list": (9, struct.pack("<IQ", 9, 0))}), "some.list"),
    "type of a value": (header({"some.key": (13, bytes(16))}), "some.key"),
    "a truth": (header({"some.key": (7, b"\x02")}), "some.key"),
    "a text": (header({"some.key": (8, struct.pack("<Q", 2) + b"\xff\xfe")}), "some.key"),
    "a key twice": (header([("some.key", typed(1)), ("some.key", typed(1))]), "some.key"),
    "an empty key": (header([("", typed(1))]), "key ''"),
    "alignment": (header({"general.alignment": typed(48)}), "general.alignment"),
    "alignment of zero": (header({"general.alignment": typed(0)}), "general.alignment"),
    "kind of alignment": (header({"general.alignment": typed("32")}), "general.alignment"),
    "tensor twice": (padded(header({}, [tensor("t", (1,), 0, 0)] * 2)) + bytes(64), "'t'"),
    "no dimensions": (padded(header({}, [tensor("t", (), 0, 0)])) + bytes(64), "'t'"),
    "many dimensions": (header({}, [text("t") + struct.pack("<I", 1 << 31) + bytes(64)]), "'t'"),
    "an empty tensor": (padded(header({}, [tensor("t", (4, 0), 0, 0)])) + bytes(64), "'t'"),
    "size": (padded(header({}, [tensor("t", (1 << 62, 1 << 62), 0, 0)])) + bytes(64), "'t'"),
    "broken blocks": (padded(header({}, [tensor("t", (2, 33), 8, 0)])) + bytes(99), "'t'"),
    "offset": (padded(header({}, [tensor("t", (4,), 0, _HUGE)])) + bytes(64), "'t'"),
    "end": (padded(header({}, [tensor("t", (16,), 0, 32)])) + bytes(64), "'t'"),
    "no multiple of the alignment": (padded(header({}, [tensor("t", (4,), 0, 8)])) + bytes(64), "'t'"),
    "type by its name": (padded(header({}, [tensor("t", (256,), 16, 0)])) + bytes(99), "IQ2_XXS"),
    "type by its number": (padded(header({}, [tensor("t", (256,), 99, 0)])) + bytes(99), "99"),
    "overlap": (
        padded(header({}, [tensor("s", (16,), 0, 0), tensor("t", (16,), 0, 32)])) + bytes(128),
        "'s' and 't' overlap",
    ),
}


@pytest.mark.parametrize("name", _LIES)
def test_a_lie_is_refused_by_name_before_it_costs_memory(path: Path, name: str) -> None:
    data, named = _LIES[name]
    assert named in _refused(path, data)


def test_a_file_that_is_cut_short_is_refused_wherever_it_is_cut(path: Path) -> None:
    for end in range(len(_FILE)):
        _refused(path, _FILE[:end])


def _survives(path: Path, data: bytes) -> bool:
    """Say whether the file is read, and its tensors too; else it must be a ConfigError."""
    path.write_bytes(data)
    try:
        found = read_gguf(path)
    except ConfigError:
        return False
    for info in found.tensors.values():
        assert info.type.read(info.blocks(0, info.num_rows)).shape == (info.num_rows, info.shape[-1])
    return True


@given(data=st.data())
def test_what_is_no_header_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes of hypothesis, which knows how the header begins."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    counts = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    _survives(path, b"GGUF" + struct.pack("<IQQ", 3, *counts) + data.draw(st.binary(max_size=200)))


_EXTREMES = (0, 1, 31, 255, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 63, _HUGE)


@pytest.mark.sweep
def test_mutated_files_end_in_typed_errors(path: Path) -> None:
    """4,000 files with some bytes, or a number of 4 or 8 bytes, in the place of others, or cut short."""
    rng = random.Random(39)
    read = 0
    for _ in range(4_000):
        changed = bytearray(_FILE)
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(len(header(_KEYS, _TENSORS)))
            width = rng.choice((1, 4, 8))
            value = rng.choice(_EXTREMES) if rng.random() < 0.6 else rng.getrandbits(64)
            changed[at : at + width] = value.to_bytes(8, "little")[:width]
        cut = len(changed) if rng.random() < 0.8 else rng.randrange(len(changed))
        read += _survives(path, bytes(changed[:cut]))
    assert 20 < read < 3_000  # neither are all refused, nor is nothing looked at


def _part(number: int, name: str, *, count: int = 2, total: int | None = 2) -> bytes:
    keys = {"split.no": typed(number), "split.count": typed(count)}
    if total is not None:
        keys["split.tensors.count"] = typed(total)
    return padded(header(keys, [tensor(name, (8,), 0, 0)])) + bytes([number] * 32)


def test_parts_are_one_model(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2))
    first.write_bytes(_part(0, "one"))
    second.write_bytes(_part(1, "two"))
    tensors = read_gguf(first).tensors
    assert {name: info.file for name, info in tensors.items()} == {"one": first, "two": second}


_WRONG_PARTS: Mapping[str, tuple[Mapping[str, bytes], str, str]] = {
    "absent": ({"m-00001-of-00002.gguf": _part(0, "one")}, "m-00001", "m-00002-of-00002.gguf"),
    "renamed": ({"m.gguf": _part(0, "one")}, "m.gguf", "-00001-of-00002.gguf"),
    "not the first": ({"m-00002-of-00002.gguf": _part(1, "one")}, "m-00002", "give the first"),
    "alone": ({"m-00001-of-00002.gguf": _FILE}, "m-00001", "split.count"),
    "of another model": (
        {"m-00001-of-00002.gguf": _part(0, "one"), "m-00002-of-00002.gguf": _part(2, "two", count=3)},
        "m-00001",
        "part 2 of 2",
    ),
    "a tensor twice": (
        {"m-00001-of-00002.gguf": _part(0, "one"), "m-00002-of-00002.gguf": _part(1, "one")},
        "m-00001",
        "tensor one",
    ),
    "number of tensors": (
        {"m-00001-of-00002.gguf": _part(0, "one", total=3), "m-00002-of-00002.gguf": _part(1, "two")},
        "m-00001",
        "split.tensors.count",
    ),
    "many": ({"m-00001-of-99999.gguf": _part(0, "one", count=99999)}, "m-00001", "00002-of-99999"),
}


@pytest.mark.parametrize("name", _WRONG_PARTS)
def test_parts_that_are_not_one_model_are_refused(tmp_path: Path, name: str) -> None:
    files, begin, named = _WRONG_PARTS[name]
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    path = next(path for path in tmp_path.iterdir() if path.name.startswith(begin))
    with pytest.raises(ConfigError, match=named):
        read_gguf(path)
