"""In whatever order the chunks of an update come, its leaves are those of a fresh engine, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.checkpoint import SHAPES, write_checkpoint
from penstock.runtime import Engine
from penstock.runtime.updating.interface import UpdateOutcome
from tests.support.goldens import GOLDEN
from tests.support.suite.drawing import few
from tests.support.updating import (
    Arrays,
    begun,
    bits,
    changed,
    fresh_bits,
    small_engine,
    tensors_of,
    tokens,
)

pytestmark = pytest.mark.ci


@dataclass
class Served:
    """An engine, the tensors of its checkpoint, and other tensors with the leaves that a fresh engine makes
    of them.
    """

    engine: Engine
    old: Arrays
    new: Arrays
    new_bits: list[bytes]
    new_tokens: list[int]
    old_bits: list[bytes]
    directory: Path
    folder: Path
    options: dict[str, Any]
    count: int = 0


FORMATS = ("plain", "tied", "packed", "int8", "packed int8", "int4")


@pytest.fixture(
    scope="module", params=few(FORMATS, ["tied", "packed", "packed int8"], shared="engine of uploads")
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("served")
    directory, changes = GOLDEN / "qwen2", {}
    if request.param == "tied":
        directory = GOLDEN / "qwen3"
    elif request.param != "plain":
        directory = folder / "tiny"
        directory.mkdir()
        write_checkpoint(directory, SHAPES["tiny"])
    if "int8" in request.param:
        changes["quantization"] = "int8"
    if request.param == "int4":
        changes["quantization"] = "int4"
    if request.param == "int8":
        changes["native"] = "off"
    old = tensors_of(directory)
    new = changed(old)
    engine = small_engine(directory, **changes)
    new_bits = fresh_bits(directory, new, folder / "new", **changes)
    fresh = small_engine(folder / "new", **changes)
    new_tokens = tokens(fresh)
    fresh.shutdown()
    yield Served(engine, old, new, new_bits, new_tokens, bits(engine), directory, folder, changes)
    engine.shutdown()


@st.composite
def interleavings(draw: st.DrawFn, tensors: Arrays) -> list[tuple[int, int, int]]:
    """Draw chunks (tensor, begin, end): those of one tensor in order, chunks of different tensors in any
    order.
    """
    sizes = [tensor.nbytes for tensor in tensors.values()]
    cuts = [
        sorted({0, size, *draw(st.lists(st.integers(1, size - 1), max_size=3))}) if size > 1 else [0, size]
        for size in sizes
    ]
    turns = draw(st.permutations([i for i, cut in enumerate(cuts) for _ in cut[1:]]))
    at = [0] * len(sizes)
    chunks = []
    for i in turns:
        chunks.append((i, cuts[i][at[i]], cuts[i][at[i] + 1]))
        at[i] += 1
    return chunks


def upload(served: Served, tensors: Arrays, chunks: list[tuple[int, int, int]], **changes: Any) -> None:
    served.count += 1
    upload = begun(served.engine, tensors, f"update {served.count}", **changes)
    try:
        data = [tensor.tobytes() for tensor in tensors.values()]
        for index, begin, end in chunks:
            upload.write(index, begin, data[index][begin:end])
        report = upload.commit(sum(map(len, data))).result(60)
        assert report.outcome is UpdateOutcome.COMMITTED
    finally:
        upload.close()


EXAMPLES = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@EXAMPLES
@given(data=st.data())
def test_any_interleaving_gives_the_leaves_of_a_fresh_engine(served: Served, data: st.DataObject) -> None:
    upload(served, served.new, data.draw(interleavings(served.new)))
    assert bits(served.engine) == served.new_bits
    assert tokens(served.engine) == served.new_tokens
    upload(served, served.old, data.draw(interleavings(served.old)))
    assert bits(served.engine) == served.old_bits


@EXAMPLES
@given(data=st.data())
def test_a_partial_update_keeps_the_rest(served: Served, data: st.DataObject) -> None:
    """This holds for leaves of several tensors too, such as q, k and v."""
    names = data.draw(st.sets(st.sampled_from(sorted(served.new)), min_size=1, max_size=5))
    some = {name: served.new[name] for name in sorted(names)}
    upload(served, some, data.draw(interleavings(some)), partial=True)
    into = served.folder / f"mixed {served.count}"
    assert bits(served.engine) == fresh_bits(served.directory, {**served.old, **some}, into, **served.options)
    upload(served, served.old, data.draw(interleavings(served.old)))
    assert bits(served.engine) == served.old_bits
