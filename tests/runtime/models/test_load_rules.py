"""Rules that load tensors into leaves: however a leaf is cut, stacked and transposed, it loads to the same
array.
"""

import dataclasses
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from penstock.runtime.errors import CheckpointError
from penstock.runtime.loading import leaves
from penstock.runtime.loading.by_device import rules_of_each, shapes_of_each
from penstock.runtime.loading.checkpoint import check_tensors, load_config
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.loading.leaves import LeafMaker
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.loading.tensor_checks import problems_of
from penstock.runtime.machine import host_memory
from penstock.runtime.models.cutting import cut
from penstock.runtime.models.load_rules import (
    LoadRule,
    LoadRules,
    Padding,
    ParamPath,
    Source,
    Target,
    pack_rows,
    quantize_rows,
)
from penstock.runtime.models.params import leaf_shapes, load_rules
from penstock.runtime.models.rule_checks import check
from penstock.runtime.ops.native.linear import pack, packed_shape
from penstock.runtime.sent_tensors import SentTensor
from tests.support.goldens import GOLDEN

F32 = np.dtype(np.float32)
LEAF = ("layer", "weight")


def shape_of(leaf: np.ndarray) -> dict[Any, jax.ShapeDtypeStruct]:
    return {LEAF: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)}


def made_of(
    rules: Sequence[LoadRule],
    tensors: Any,
    shapes: Any,
    *,
    order: Iterable[str] | None = None,
    old: Any = None,
) -> tuple[dict[Any, tuple[np.ndarray, Any]], LeafMaker]:
    """Path to (leaf, parts that are new), of tensors that come in this order."""
    taken: dict[Any, tuple[np.ndarray, Any]] = {}

    def take(path: Any, leaf: np.ndarray, parts: Any) -> None:
        assert path not in taken
        taken[path] = leaf, parts

    maker = LeafMaker(rules, set(tensors), shapes, take, threads=3, old=old)
    try:
        for name in tensors if order is None else order:
            maker.add(name, tensors[name])
        maker.finish()
    finally:
        maker.close()
    return taken, maker


def loaded(rules: Sequence[LoadRule], tensors: Any, shapes: Any, **options: Any) -> dict[Any, np.ndarray]:
    taken, maker = made_of(rules, tensors, shapes, **options)
    assert not maker.too_large
    return {path: leaf for path, (leaf, _) in taken.items()}


def rule(name: str, shape: tuple[int, ...], **changes: Any) -> LoadRule:
    """Make a rule that makes all of a tensor all of the leaf, with these changes."""
    whole = LoadRule(sources=(Source(name, shape),), targets=(Target(LEAF),), num_rows=shape[0], dtype=F32)
    return dataclasses.replace(whole, **changes)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, np.ndarray], list[LoadRule]]:
    """Draw a leaf, tensors that hold it in pieces, and the rules that put it together.

    The leaf is [matrices, rows, columns], or one matrix. A piece is some rows of a matrix. It may be a tensor
    of its own, transposed or not; it may be fused with the piece after it; or the pieces at the same place in
    all matrices may be one stacked tensor.
    """
    is_stacked = draw(st.booleans())
    count = draw(st.integers(1, 3)) if is_stacked else 1
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    columns = draw(st.integers(1, 4))
    values = np.arange(count * sum(sizes) * columns, dtype=np.float32)
    leaf = values.reshape(count, sum(sizes), columns)
    tensors: dict[str, np.ndarray] = {}
    rules: list[LoadRule] = []
    begins = np.cumsum([0, *sizes])
    i = 0
    while i < len(sizes):
        kinds = [
            "own",
            "transposed",
            "stacked",
            "stacked and transposed",
            *(["fused"] if i + 1 < len(sizes) else []),
        ]
        kind = draw(st.sampled_from(kinds))
        num_pieces = 2 if kind == "fused" else 1
        first, last = int(begins[i]), int(begins[i + num_pieces])
        part = leaf[:, first:last]
        if kind.startswith("stacked"):
            transposed = kind.endswith("transposed")
            tensors[f"{i}"] = part.transpose(0, 2, 1) if transposed else part
        for matrix in range(count):
            at = (matrix,) if is_stacked else ()
            name = f"{i}" if kind.startswith("stacked") else f"{i}.{matrix}"
            if kind in ("own", "fused"):
                tensors[name] = part[matrix]
            elif kind == "transposed":
                tensors[name] = part[matrix].T
            within = 0
            for size in sizes[i : i + num_pieces]:
                source = Source(
                    name,
                    tensors[name].shape,
                    at=(matrix,) if kind.startswith("stacked") else (),
                    begin=within,
                    axis=int("transposed" in kind),
                )
                target = Target(LEAF, at=at, begin=first + within)
                rules.append(LoadRule(sources=(source,), targets=(target,), num_rows=size, dtype=F32))
                within += size
        i += num_pieces
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    return (leaf if is_stacked else leaf[0]), tensors, draw(st.permutations(rules))


@given(cuts(), st.data())
@settings(max_examples=150, deadline=None)
def test_any_partition_of_a_leaf_loads_to_the_same_array(case: Any, data: st.DataObject) -> None:
    leaf, tensors, rules = case
    check(LoadRules(rules=tuple(rules)), shape_of(leaf))
    order = data.draw(st.permutations(sorted(tensors)))
    np.testing.assert_array_equal(loaded(rules, tensors, shape_of(leaf), order=order)[LEAF], leaf)


@given(cuts(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_missing_doubled_or_moved_rule_is_found(case: Any, data: st.DataObject) -> None:
    leaf, _, rules = case
    i = data.draw(st.integers(0, len(rules) - 1))
    (target,) = rules[i].targets
    moved = dataclasses.replace(rules[i], targets=(dataclasses.replace(target, begin=target.begin + 1),))
    for wrong in (rules[:i] + rules[i + 1 :], [*rules, rules[i]], [*rules[:i], moved, *rules[i + 1 :]]):
        with pytest.raises(ValueError, match=r"\('layer', 'weight'\)|nobody reads"):
            check(LoadRules(rules=tuple(wrong)), shape_of(leaf))


@given(cuts(), st.data())
@settings(max_examples=100, deadline=None)
def test_an_update_of_some_tensors_keeps_the_rest_of_the_leaf(case: Any, data: st.DataObject) -> None:
    leaf, tensors, rules = case
    names = data.draw(st.sets(st.sampled_from(sorted(tensors)), min_size=1))
    new = {name: -tensors[name] for name in names}
    made, _ = made_of(rules, new, shape_of(leaf), old=lambda path: leaf)
    found, parts = made[LEAF]
    expected = leaf.copy()
    for each in rules:
        if each.sources[0].name in names:
            expected[each.targets[0].part(0, each.num_rows)] *= -1
    np.testing.assert_array_equal(found, expected)
    if parts is not None:  # merged over another update's leaf, the parts change only what is new
        merged = leaf.copy()
        for part in parts:
            merged[part] = found[part]
        np.testing.assert_array_equal(merged, expected)
    else:
        np.testing.assert_array_equal(expected, -leaf)


def test_pieces_are_read_from_a_file_and_cut_into_tasks(tmp_path, monkeypatch):
    """A stacked tensor, a transposed one and a fused one are read in tasks of one row each."""
    monkeypatch.setattr(leaves, "_TASK_VALUES", 1)
    monkeypatch.setattr(leaves, "_STEP_VALUES", 1)
    leaf = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)
    stacked, transposed, fused = leaf[:, :2], leaf[0, 2:].T, leaf[1, 2:]
    tensors = {"stacked": stacked, "transposed": transposed, "fused": fused}
    save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, tmp_path / "model.safetensors")
    rules = [
        *(
            rule(
                "stacked",
                (2, 2, 3),
                num_rows=2,
                sources=(Source("stacked", (2, 2, 3), at=(i,)),),
                targets=(to,),
            )
            for i, to in enumerate((Target(LEAF, at=(0,)), Target(LEAF, at=(1,))))
        ),
        rule(
            "transposed",
            (3, 3),
            sources=(Source("transposed", (3, 3), axis=1),),
            targets=(Target(LEAF, (0,), 2),),
        ),
        rule("fused", (3, 3), num_rows=1, targets=(Target(LEAF, (1,), 2),)),
        rule(
            "fused",
            (3, 3),
            num_rows=2,
            sources=(Source("fused", (3, 3), begin=1),),
            targets=(Target(LEAF, (1,), 3),),
        ),
    ]
    check(LoadRules(rules=tuple(rules)), shape_of(leaf))
    np.testing.assert_array_equal(loaded(rules, find_tensors(tmp_path), shape_of(leaf))[LEAF], leaf)


def test_a_tensor_without_axes_fills_one_row(tmp_path):
    tensors = {"least": np.asarray(-1.5, np.float32), "most": np.asarray(np.inf, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    rules = [
        rule(name, (1,), sources=(Source(name, ()),), targets=(Target(LEAF, begin=i),))
        for i, name in enumerate(tensors)
    ]
    leaf = np.asarray([-1.5, np.inf], np.float32)
    check(LoadRules(rules=tuple(rules)), shape_of(leaf))
    np.testing.assert_array_equal(loaded(rules, find_tensors(tmp_path), shape_of(leaf))[LEAF], leaf)


def test_a_tensor_is_held_until_all_that_read_it_have():
    """The first tensor is half of two rules; the second and third complete one each."""
    leaf = np.zeros((2, 3), np.float32)
    numbers: weakref.WeakValueDictionary[str, np.ndarray] = weakref.WeakValueDictionary()
    rules = [
        LoadRule(
            sources=(Source("numbers", (2, 3), begin=i), Source(f"scales {i}", (1,))),
            targets=(Target(LEAF, begin=i),),
            num_rows=1,
            dtype=F32,
            put=expand,
        )
        for i in range(2)
    ]
    taken = {}
    maker = LeafMaker(
        rules,
        {"numbers", "scales 0", "scales 1"},
        shape_of(leaf),
        lambda path, leaf, parts: taken.update({path: leaf}),
        threads=1,
    )
    numbers["tensor"] = tensor = np.ones((2, 3), np.float32)
    maker.add("numbers", tensor)
    del tensor
    maker.add("scales 1", np.full((1,), 3, np.float32))
    assert not taken
    assert "tensor" in numbers
    with pytest.raises(RuntimeError, match="not all leaves are complete"):
        maker.finish()
    assert "tensor" in numbers
    maker.add("scales 0", np.full((1,), 2, np.float32))
    maker.finish()
    assert "tensor" not in numbers
    maker.close()
    np.testing.assert_array_equal(taken[LEAF], [[2, 2, 2], [3, 3, 3]])


def expand(parts: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> None:
    """Expand a toy format: a tensor of whole numbers, and one with a factor for each of its rows."""
    parts[0][...] = rows[0].astype(np.float32) * rows[1][:, None]


INT8 = np.dtype(np.int8)
TOY_FORMAT = LoadRule(
    sources=(Source("numbers", (6, 4), dtype=INT8), Source("scales", (6,))),
    targets=(Target(LEAF),),
    num_rows=6,
    dtype=F32,
    put=expand,
)
NUMBERS = np.arange(24, dtype=np.int8).reshape(6, 4)
SCALES = np.array([1, 0.5, 2, 4, 0.25, 8], np.float16)


def test_a_format_of_several_tensors_makes_one_leaf(monkeypatch):
    leaf = NUMBERS * SCALES.astype(np.float32)[:, None]
    tensors = {"numbers": NUMBERS, "scales": SCALES}
    for values in (1, 1 << 20):
        monkeypatch.setattr(leaves, "_TASK_VALUES", values)
        monkeypatch.setattr(leaves, "_STEP_VALUES", values)
        np.testing.assert_array_equal(loaded([TOY_FORMAT], tensors, shape_of(leaf))[LEAF], leaf)


def problems(rules: LoadRules, partial: bool = False, **tensors: np.ndarray) -> list[tuple[str, str]]:
    sent = [SentTensor(name, name_of(t.dtype), t.shape) for name, t in tensors.items()]
    return [(problem.reason.name, str(problem)) for problem in problems_of(rules, sent, partial=partial)]


def test_a_format_needs_all_of_its_tensors_and_their_own_dtype():
    rules = LoadRules(rules=(TOY_FORMAT,))
    assert not problems(rules, partial=True, numbers=NUMBERS, scales=SCALES)
    assert problems(rules, partial=True, numbers=NUMBERS) == [("MISSING", "scales (missing)")]
    assert problems(rules, numbers=NUMBERS.astype(np.float32), scales=SCALES) == [
        ("DTYPE", "numbers has dtype F32, expected I8")
    ]
    assert problems(rules, numbers=NUMBERS, scales=SCALES.astype(np.int8)) == [
        ("DTYPE", "scales has dtype I8, expected F32 or another one of floats")
    ]
    assert problems(rules, partial=True, numbers=NUMBERS, scales=SCALES, zeros=SCALES) == [
        ("UNKNOWN_NAME", "zeros (unknown name)")
    ]


def test_a_checkpoint_may_hold_harmless_tensors_and_copies():
    rules = LoadRules(rules=(rule("w", (2, 2)),), harmless=(r"\.inv_freq$",), copies={"head": "w"})
    w = np.ones((2, 2), np.float32)
    check_tensors(rules, {"w": w, "head": w.copy(), "x.inv_freq": w}, where="here")
    with pytest.raises(CheckpointError, match="head has dtype F64, expected F32"):
        check_tensors(rules, {"w": w, "head": w.astype(np.float64)}, where="here")
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): inv_freq"):
        check_tensors(rules, {"w": w, "inv_freq": w}, where="here")


def test_blocks_of_rows_lie_in_a_stacked_leaf_of_tiles():
    """Packed experts are an example: 16 rows are one entry of the leaf."""
    values = np.random.default_rng(0).standard_normal((2, 48, 64)).astype(jnp.bfloat16)
    tiles = np.stack([pack(matrix) for matrix in values])
    assert tiles.shape[1:] == packed_shape(48, 64, int8=False)
    rules = [
        LoadRule(
            sources=(Source(f"{i}.{name}", (size, 64)),),
            targets=(Target(LEAF, at=(i,), begin=begin // 16, rows_per_entry=16),),
            num_rows=size,
            dtype=values.dtype,
            put=pack_rows,
        )
        for i in range(2)
        for name, begin, size in (("gate", 0, 32), ("up", 32, 16))
    ]
    tensors = {f"{i}.gate": values[i, :32] for i in range(2)} | {f"{i}.up": values[i, 32:] for i in range(2)}
    check(LoadRules(rules=tuple(rules)), shape_of(tiles))
    np.testing.assert_array_equal(loaded(rules, tensors, shape_of(tiles))[LEAF], tiles)
    half = dataclasses.replace(rules[0], num_rows=24, sources=(Source("0.gate", (24, 64)),))
    with pytest.raises(ValueError, match=r"0\.gate shall fill .*24 rows: no whole blocks"):
        check(LoadRules(rules=(half, *rules[1:])), shape_of(tiles))


def test_scales_go_to_a_leaf_of_their_own():
    """One rule has two targets. One of them has padding, which is named."""
    matrix = np.array([[1, -127], [254, 2]], np.float32)
    shapes: dict[ParamPath, jax.ShapeDtypeStruct] = {
        LEAF: jax.ShapeDtypeStruct((2, 2), np.int8),
        ("scales",): jax.ShapeDtypeStruct((4,), np.float32),
    }
    targets = (Target(LEAF), Target(("scales",), begin=1))
    rules = LoadRules(
        rules=(rule("w", (2, 2), targets=targets, put=quantize_rows),),
        padding=(Padding(("scales",), 0, 1), Padding(("scales",), 3, 1)),
    )
    check(rules, shapes)
    made = loaded(rules.rules, {"w": matrix}, shapes)
    np.testing.assert_array_equal(made[LEAF], [[1, -127], [127, 1]])
    np.testing.assert_array_equal(made["scales",], [0, 1, 2, 0])
    with pytest.raises(ValueError, match=r"no tensor fills \[0\] of the leaf \('scales',\)"):
        check(dataclasses.replace(rules, padding=rules.padding[1:]), shapes)


def test_mistakes_of_a_model_name_tensor_and_leaf():
    shapes: dict[ParamPath, jax.ShapeDtypeStruct] = {LEAF: jax.ShapeDtypeStruct((4, 2), F32)}
    for wrong, message in (
        ((), r"no tensor fills any of the leaf \('layer', 'weight'\)"),
        ((rule("w", (3, 2)),), r"no tensor fills \[3\] of the leaf \('layer', 'weight'\)"),
        ((rule("w", (4, 2)), rule("v", (1, 2))), r"both w and v fill .* of the leaf \('layer', 'weight'\)"),
        ((rule("w", (5, 2)),), r"the leaf \('layer', 'weight'\), which w shall fill, has shape \(4, 2\)"),
        ((rule("w", (5, 2), num_rows=4),), r"nobody reads \[4\] of the tensor w"),
        ((rule("w", (3, 2), num_rows=4),), r"the tensor w has shape \(3, 2\)"),
        ((rule("w", (4, 2), targets=(Target(("x",)),)),), r"w shall fill \('x',\), which is no leaf"),
    ):
        with pytest.raises(ValueError, match=message):
            check(LoadRules(rules=wrong), shapes)


def test_overflow_is_found_in_transposed_tensors_too():
    wide = np.array([[1, 2], [1e30, 4]], np.float64)
    half = rule("w", (2, 2), dtype=np.dtype(np.float16), sources=(Source("w", (2, 2), axis=1),))
    _, maker = made_of([half], {"w": wide}, {LEAF: jax.ShapeDtypeStruct((2, 2), np.float16)})
    assert maker.too_large == {"w": np.dtype(np.float16)}


@pytest.mark.parametrize("kind", [np.float32, jnp.bfloat16, jnp.float8_e5m2])
def test_infinity_is_no_value_beyond_the_range(kind):
    values = np.array([[1, np.inf], [-np.inf, np.nan]], kind)
    if kind is np.float32:
        values.view(np.uint32)[1, 1] = 0x7F800001  # a NaN that signals
    half = rule("w", (2, 2), dtype=np.dtype(np.float16))
    shapes = {LEAF: jax.ShapeDtypeStruct((2, 2), np.float16)}
    made = loaded([half], {"w": values}, shapes)
    np.testing.assert_array_equal(made[LEAF], np.array([[1, np.inf], [-np.inf, np.nan]], np.float16))


@pytest.mark.parametrize("kind", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("served", [np.float32, np.float16, jnp.bfloat16])
def test_floats_of_8_bits_keep_their_values(kind, served):
    every = np.arange(256, dtype=np.uint8).view(kind).reshape(16, 16)
    eighth = rule("w", (16, 16), dtype=np.dtype(served))
    made = loaded([eighth], {"w": every}, {LEAF: jax.ShapeDtypeStruct((16, 16), served)})
    np.testing.assert_array_equal(made[LEAF].astype(np.float32), every.astype(np.float32))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_leaves_of_files_are_made_one_device_after_the_other(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two leaves, as one device has them, are in host memory: one that waits for a thread, and one
    that is filled. The pool of small parameters is not counted.
    """
    config, found = cut(load_config(GOLDEN / "mixtral"), devices), find_tensors(GOLDEN / "mixtral")
    rules: Sequence[LoadRule] = load_rules(config, "float32").rules
    shapes: Any = leaf_shapes(config, "float32")
    if devices > 1:
        rules, shapes = rules_of_each(rules), shapes_of_each(shapes)
    largest = max(math.prod(leaf.shape) for leaf in shapes.values())
    held, most = 0, 0
    axes_of_pool = 1 if devices == 1 else 2

    def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        nonlocal held, most
        made = np.zeros(shape, dtype)
        held += made.size if len(shape) > axes_of_pool else 0
        most = max(most, held)
        return made

    def take(path: Any, leaf: np.ndarray, parts: Any) -> None:
        nonlocal held
        held -= leaf.size if leaf.ndim > axes_of_pool else 0

    monkeypatch.setattr(host_memory, "zeros", zeros)
    maker = LeafMaker(rules, set(found), shapes, take, threads=1)
    try:
        maker.add_all(found)
        maker.finish()
    finally:
        maker.close()
    assert largest <= most <= 2 * largest
    assert held == 0
