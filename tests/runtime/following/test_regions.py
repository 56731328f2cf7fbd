"""Which regions of tensors a follower needs: exactly what its rules read, and no value twice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.following import regions
from penstock.runtime.following.regions import KeptRegions, PartsOfTensor, Region, regions_of, values_in
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.loading.own_rules import own_rules, own_shapes
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.models.cutting import cut
from penstock.runtime.models.load_rules import (
    Cut,
    LoadRule,
    LoadRules,
    Source,
    Span,
    Target,
    put_zeros,
)
from penstock.runtime.models.params import leaf_shapes, load_rules
from penstock.runtime.models.stages import stages_of
from penstock.runtime.sent_tensors import SentTensor
from tests.runtime.following.test_own_rules import filled
from tests.support.goldens import GOLDEN

FLOAT32 = np.dtype(np.float32)


def rule(source: Source, num_rows: int, **more: Any) -> LoadRule:
    return LoadRule(sources=(source,), targets=(Target(("leaf",)),), num_rows=num_rows, dtype=FLOAT32, **more)


def found(*rules: LoadRule, shape: tuple[int, ...]) -> list[Region]:
    return list(regions_of(rules, [SentTensor("w", "F32", shape)])["w"])


@pytest.mark.parametrize(
    ("shape", "sources", "expected"),
    [
        ((8, 4), [Source("w", (8, 4), begin=4)], [(range(4, 6), range(4))]),
        # The columns of a matrix, and rows of one that is stored transposed.
        ((8, 4), [Source("w", (8, 4), columns=slice(2, 4))], [(range(2), range(2, 4))]),
        ((4, 8), [Source("w", (4, 8), begin=6, axis=1)], [(range(4), range(6, 8))]),
        # Channels that take turns, of which one rule reads the even and the other the odd ones.
        (
            (9, 4),
            [Source("w", (9, 4), order=(0, 2)), Source("w", (9, 4), begin=1, order=(0, 2))],
            [(range(4), range(4))],
        ),
        ((9, 4), [Source("w", (9, 4), order=(7, 2))], [(range(2, 3), range(4)), (range(7, 8), range(4))]),
        # Matrices that are stacked, and the same one for two devices.
        (
            (4, 8, 2),
            [Source("w", (4, 8, 2), at=(number,), begin=2) for number in (2, 3, 2)],
            [(range(2, 4), range(2, 4), range(2))],
        ),
        ((8, 4), [Source("w", (8, 4), begin=begin) for begin in (0, 1)], [(range(3), range(4))]),
        ((), [Source("w", ())], [(range(1),)]),
        ((5,), [Source("w", (5,), begin=1)], [(range(1, 3),)]),
    ],
)
def test_regions_by_hand(shape: tuple[int, ...], sources: list[Source], expected: list[Region]) -> None:
    rules = [rule(source, 1 if shape == () else 2) for source in sources]
    assert found(*rules, shape=shape) == expected


def test_nothing_is_needed_for_zeros() -> None:
    assert found(rule(Source("w", (8, 4)), 2, put=put_zeros), shape=(8, 4)) == []


@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=4), most=st.integers(1, 200))
def test_a_large_region_is_cut(shape: list[int], most: int) -> None:
    """Together the regions have each value of the tensor once, and none is larger than it may be."""
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "REGION_BYTES", 4 * most)
        cut_up = found(rule(Source("w", tuple(shape)), shape[0]), shape=tuple(shape))
    parts = [values_in(region, values) for region in cut_up]
    assert all(part.size <= most for part in parts)
    assert sorted(np.concatenate([part.reshape(-1) for part in parts])) == list(range(values.size))


def halved(*names: str, rows: int) -> LoadRules:
    """Make the rules of weights [rows, 4] with these names, whose rows are cut over two devices."""
    rules = [
        rule(Source(name, (rows, 4)), rows // 2, cut=Cut(along="rows", spans=(Span(2, rows // 2),)))
        for name in names
    ]
    return LoadRules(rules=tuple(rules)).on_devices(2)


def test_regions_are_kept_for_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second device needs the second half of the rows. What was found is found anew only for a tensor of
    another size or dtype, and by other rules.
    """
    asked: list[list[str]] = []

    def counted(rules: Any, sent: Any) -> Any:
        asked.append([each.name for each in sent])
        return regions_of(rules, sent)

    monkeypatch.setattr(regions, "regions_of", counted)
    kept, rules, half = KeptRegions(range(1, 2), 2), halved("v", "w", rows=8), (range(4, 8), range(4))
    v, w = (SentTensor(name, "F32", (8, 4)) for name in "vw")
    assert kept.of(rules, [w]) == {"w": (half,)}
    assert kept.of(rules, [v, w]) == {"v": (half,), "w": (half,)}
    assert kept.of(rules, [w, v]) == {"v": (half,), "w": (half,)}
    assert asked == [["w"], ["v"]]
    assert kept.of(rules, [SentTensor("w", "BF16", (8, 4))]) == {"w": (half,)}
    assert asked == [["w"], ["v"], ["w"]]
    assert kept.of(halved("w", rows=4), [w]) == {"w": ((range(2, 4), range(4)),)}


def test_two_updates_that_begin_at_a_time_do_not_mix_their_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's own updates wait for no other. While one finds the regions of its tensors, another begins
    whose names have other rules.
    """
    kept, rules, others = KeptRegions(range(1, 2), 2), halved("w", rows=8), halved("w", rows=4)
    w = SentTensor("w", "F32", (8, 4))
    first, second = (range(4, 8), range(4)), (range(2, 4), range(4))
    seen: list[Any] = []

    def interrupted(*arguments: Any) -> Any:
        if not seen:
            seen.append("begun")
            seen.append(kept.of(others, [w]))
        return regions_of(*arguments)

    monkeypatch.setattr(regions, "regions_of", interrupted)
    assert kept.of(rules, [w]) == {"w": (first,)}
    assert seen[1] == {"w": (second,)}
    assert [kept.of(each, [w]) for each in (others, rules)] == [{"w": (second,)}, {"w": (first,)}]


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_with_a_stage_needs_the_matrices_of_its_own_layers(number: int) -> None:
    """And those of the first stage, or of the last one. This model has another head than its embeddings."""
    config, tensors = load_config(GOLDEN / "llama"), find_tensors(GOLDEN / "llama")
    kept = KeptRegions(range(1), 1, stages_of(config, 2)[number])
    sent = [SentTensor(each, name_of(tensor.dtype), tensor.shape) for each, tensor in tensors.items()]
    matrices = {each.name for each in sent if len(each.shape) == 2}
    needed = {name for name, found in kept.of(load_rules(config), sent).items() if found}
    own = {name for name in matrices if name.startswith(f"model.layers.{number}.")}
    at_end = "lm_head.weight" if number else "model.embed_tokens.weight"
    assert needed & matrices == own | {at_end}
    assert own


def test_more_or_fewer_bytes_than_a_region_has_are_refused() -> None:
    sent = SentTensor("w", "F32", (4, 4))
    with pytest.raises(ValueError, match="reshape"):
        PartsOfTensor(sent, [(range(2), range(4))]).append(bytes(20))
    with pytest.raises(ValueError, match="none are needed"):
        PartsOfTensor(sent, []).append(bytes(4))


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("qwen3", range(1, 2)),
        ("qwen3", range(2, 4)),  # of four devices, which have two heads of keys
        ("deepseek_v3", range(1, 2)),
        ("qwen3_moe", range(1, 2)),
        ("gpt_oss", range(1, 2)),
        ("lfm2", range(1, 2)),
    ],
)
def test_what_a_follower_gets_fills_its_leaves_as_whole_tensors_do(name: str, own: range) -> None:
    """What it does not get is NaN here, so a rule that read it would be found out. No value comes twice."""
    devices = own.stop
    config, tensors = cut(load_config(GOLDEN / name), devices), find_tensors(GOLDEN / name)
    rules = own_rules(load_rules(config), own, devices)
    shapes = own_shapes(leaf_shapes(config), own, devices)
    sent = [SentTensor(each, name_of(tensor.dtype), tensor.shape) for each, tensor in tensors.items()]
    got: dict[str, Any] = {}
    for each, needed in regions_of(rules.rules, sent).items():
        values = np.asarray(tensors[each][:] if tensors[each].shape else tensors[each][()])
        parts = PartsOfTensor(next(one for one in sent if one.name == each), needed)
        parts.values.reshape(-1).view(np.uint8)[...] = 255
        counts = np.zeros(values.shape, np.int32)
        for region in needed:
            parts.append(values_in(region, values).tobytes())
            values_in(region, counts)[...] += 1
        assert parts.is_complete
        assert counts.max(initial=0) <= 1, each
        got[each] = parts.values
    whole = filled(rules, shapes, tensors)
    ours = filled(rules, shapes, got)
    for path, leaf in whole.items():
        np.testing.assert_array_equal(ours[path], leaf, err_msg=str(path))
