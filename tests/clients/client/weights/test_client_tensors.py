"""Arrays and files as tensors of an update: what is sent of them, and the digest."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.flax import save_file as save_jax_file
from safetensors.numpy import save_file

from penstock.client import Client, InvalidRequest, weights_digest
from penstock.v1 import weights_pb2


class OnlyArray:
    """What has nothing but `__array__`."""

    def __init__(self, value):
        self._value = value

    def __array__(self, dtype=None, copy=None):
        return self._value


class OnlyDlpack:
    """What has nothing but DLPack's two methods."""

    def __init__(self, value):
        self._value = value

    def __dlpack__(self, **options):
        return self._value.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._value.__dlpack_device__()


class torch_like:
    """An array that NumPy cannot read, as a bfloat16 tensor of PyTorch."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")


torch_like.__module__ = "torch"

F32 = np.arange(6, dtype=np.float32).reshape(2, 3)
LITTLE = F32.tobytes()
BF16 = bytes.fromhex("803f20c0")
CASES = {
    "float32": (F32, "F32", [2, 3], LITTLE),
    "float16": (np.array([1.5], np.float16), "F16", [1], bytes.fromhex("003e")),
    "bfloat16": (np.array([1.0, -2.5], ml_dtypes.bfloat16), "BF16", [2], BF16),
    "float8_e4m3fn": (np.array([1.0, -2.0], ml_dtypes.float8_e4m3fn), "F8_E4M3", [2], b"\x38\xc0"),
    "float8_e5m2": (np.array([1.0, -2.0], ml_dtypes.float8_e5m2), "F8_E5M2", [2], b"\x3c\xc0"),
    "int8": (np.array([[1, -2]], np.int8), "I8", [1, 2], b"\x01\xfe"),
    "int4, low half first": (np.array([1, -2, 3], ml_dtypes.int4), "I4", [3], b"\xe1\x03"),
    "scalar": (np.float32(1), "F32", [], bytes.fromhex("0000803f")),
    "empty": (np.zeros((2, 0), np.float32), "F32", [2, 0], b""),
    "big-endian": (F32.astype(">f4"), "F32", [2, 3], LITTLE),
    "transposed": (np.asfortranarray(F32), "F32", [2, 3], LITTLE),
    "strided": (np.repeat(F32, 2, axis=1)[:, ::2], "F32", [2, 3], LITTLE),
    "read-only": (np.frombuffer(LITTLE, np.float32).reshape(2, 3), "F32", [2, 3], LITTLE),
    "jax": (jnp.arange(6, dtype=jnp.float32).reshape(2, 3), "F32", [2, 3], LITTLE),
    "jax bfloat16": (jnp.array([1.0, -2.5], jnp.bfloat16), "BF16", [2], BF16),
    "__array__": (OnlyArray(F32), "F32", [2, 3], LITTLE),
    "__dlpack__": (OnlyDlpack(F32), "F32", [2, 3], LITTLE),
}


@pytest.mark.parametrize(("value", "dtype", "shape", "data"), CASES.values(), ids=CASES)
def test_arrays_are_sent_as_the_contract_wants_them(server, value, dtype, shape, data):
    with Client(server.addr) as client:
        client.update_weights({"a": value}, label="l")
    (spec,) = server.updates.begins[0].manifest.tensors
    assert (spec.name, spec.dtype, [*spec.shape]) == (
        "a",
        weights_pb2.DataType.Value(f"DATA_TYPE_{dtype}"),
        shape,
    )
    assert server.updates.received == [{"a": data}]


def test_an_array_that_numpy_cannot_read_is_named_with_a_way_out():
    with pytest.raises(
        InvalidRequest, match=r"tensors\['a'\]: NumPy cannot read it: .*view\(ml_dtypes.bfloat16\)"
    ):
        weights_digest({"a": torch_like()})


def pushed(server, source):
    with Client(server.addr) as client:
        client.update_weights(source, label="l")
    manifest = server.updates.begins[-1].manifest.tensors
    names = {spec.name: weights_pb2.DataType.Name(spec.dtype)[10:] for spec in manifest}
    return names, server.updates.received[-1]


def test_a_file_of_the_package_safetensors(server, tmp_path):
    """Written by the format's own package, with its metadata."""
    file = tmp_path / "x.safetensors"
    arrays = {"b": jnp.array([1.0, -2.5], jnp.bfloat16), "a": jnp.asarray(F32), "s": jnp.float32(1)}
    save_jax_file(arrays, file, metadata={"format": "pt"})
    for source in (file, str(file)):
        dtypes, data = pushed(server, source)
        assert dtypes == {"a": "F32", "b": "BF16", "s": "F32"}
        assert data == {"a": LITTLE, "b": BF16, "s": bytes.fromhex("0000803f")}


def test_directories(server, tmp_path):
    """Of a single file, of an index, and of neither: the order in which the server looks."""
    save_file({"one": F32}, tmp_path / "one.safetensors")
    save_file({"two": F32}, tmp_path / "two.safetensors")
    assert list(pushed(server, tmp_path)[0]) == ["one", "two"]
    save_file({"two": F32}, tmp_path / "other.safetensors")
    index = {"weight_map": {"one": "one.safetensors", "two": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(pushed(server, tmp_path)[0]) == ["one", "two"]
    save_file({"single": F32}, tmp_path / "model.safetensors")
    assert list(pushed(server, tmp_path)[0]) == ["single"]


def test_layers_behind_the_pooling_of_an_encoder(server, tmp_path):
    """Sentence Transformers keeps them in folders of their own, and the server knows them by these."""
    save_file({"one": F32}, tmp_path / "model.safetensors")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Dense": "Dense"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for folder in ("1_Pooling", "2_Dense", "3_Dense"):
        (tmp_path / folder).mkdir()
        save_file({"linear.weight": F32 + len(folder)}, tmp_path / folder / "model.safetensors")
    dtypes, data = pushed(server, tmp_path)
    assert list(dtypes) == ["one", "2_Dense.linear.weight", "3_Dense.linear.weight"]
    assert data["2_Dense.linear.weight"] == (F32 + 7).tobytes()
    (tmp_path / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="3_Dense holds no"):
        weights_digest(tmp_path)


@pytest.mark.parametrize("path", ["../other", "a/b", "", ".."])
def test_folders_elsewhere_are_refused(tmp_path, path):
    save_file({"one": F32}, tmp_path / "model.safetensors")
    for text in (json.dumps([{"path": path, "type": "Dense"}]), '{"path": 1}', "[1]", "nonsense"):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(ValueError, match="is no list of modules"):
            weights_digest(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("x", "y"):
        save_file({"a": F32}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"the tensor a is in .*y\.safetensors and in another file"):
        weights_digest(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"weight_map": {"a": "../a.safetensors"}}', '{"weight_map": {"a": 7}}', "nonsense"]
)
def test_a_damaged_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="is no index of safetensors files"):
        weights_digest(tmp_path)


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


DAMAGED = {
    "short": (b"\0" * 4, "header would end"),
    "no header": ((1 << 40).to_bytes(8, "little") + b"{}", "header would end"),
    "no JSON": (b"\x02\0\0\0\0\0\0\0xx", "no complete safetensors file"),
    "cut": (entry(), 4, "its header describes"),
    "wrong place": (entry(data_offsets=[4, 8]), 8, "does not fit its place"),
    "negative": (entry(shape=[-2]), 8, "does not fit its place"),
    "no shape": (entry(shape=None), 8, "is damaged"),
    "foreign dtype": (entry(dtype="I64", shape=[1]), 8, "I64 cannot be sent; convert it to one of BF16"),
}


@pytest.mark.parametrize("case", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_before_anything_is_sent(server, tmp_path, case):
    *content, message = case
    if len(content) == 2:
        header = json.dumps({"a": content[0]}).encode()
        content = [len(header).to_bytes(8, "little") + header + bytes(content[1])]
    (tmp_path / "x.safetensors").write_bytes(content[0])
    with pytest.raises((ValueError, InvalidRequest), match=message):
        pushed(server, tmp_path / "x.safetensors")
    assert server.calls == []


def test_what_is_not_there_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        weights_digest(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no"):
        weights_digest(tmp_path)


def test_the_digest_is_that_of_the_contract(tmp_path):
    """Computed here from the words of UpdateWeightsResponse.digest."""
    arrays = {"z": F32, "a.b": np.array([1.0, -2.5], ml_dtypes.bfloat16), "s": np.float32(1)}
    text = "".join(
        f"{name} {dtype} {shape} {hashlib.sha256(data).hexdigest()}\n"
        for name, dtype, shape, data in (
            ("a.b", "BF16", "2", BF16),
            ("s", "F32", "", bytes.fromhex("0000803f")),
            ("z", "F32", "2,3", LITTLE),
        )
    )
    expected = hashlib.sha256(text.encode()).digest()
    assert weights_digest(arrays) == expected
    save_jax_file({name: jnp.asarray(value) for name, value in arrays.items()}, tmp_path / "x.safetensors")
    assert weights_digest(tmp_path) == expected


PUSH = """
import resource, sys
from pathlib import Path
from penstock.client import Client
def peak(): return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
with Client(sys.argv[1]) as client:
    client.update_weights(sys.argv[2], label="l", validate_only=True)  # so that everything is loaded
    before = peak()
    try:
        client.update_weights(sys.argv[2], label="l")
    except Exception as error:
        print(type(error).__name__)
    print("numpy" in sys.modules or "jax" in sys.modules, peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_a_file_is_never_all_in_memory(server, tmp_path):
    """The client's own process, and in it a file of 128 MiB, which the fake drops as it comes."""
    file = tmp_path / "x.safetensors"
    size = 128 << 20
    header = json.dumps({"a": {"dtype": "I8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + size)  # a hole, which reads as zeros
    server.max_chunk_bytes = 2 << 20
    server.updates.keeps = False
    done = subprocess.run(
        [sys.executable, "-c", PUSH, server.addr, file],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    loaded, grown_kib = done.stdout.split()[-2:]
    assert sum(server.updates.chunk_sizes) == size
    assert loaded == "False"
    assert int(grown_kib) < 48 << 10
