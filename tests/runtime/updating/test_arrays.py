"""Updates from arrays of the program: what is read of the arrays, and what is refused."""

from __future__ import annotations

import hashlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime import Engine
from penstock.runtime.errors import InvalidRequest, TensorsRefused
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.models.params import load_rules
from penstock.runtime.sent_tensors import TensorReason
from penstock.runtime.updating.incoming import digest_of
from tests.runtime.updating.conftest import GOLDEN
from tests.support.updating import Arrays, bits, changed, described, small_engine, tensors_of

pytestmark = pytest.mark.ci

UP = "model.layers.1.mlp.up_proj.weight"


def reasons(refused: pytest.ExceptionInfo[TensorsRefused]) -> dict[str, TensorReason]:
    return {problem.name: problem.reason for problem in refused.value.problems}


def test_new_leaves_share_no_memory_with_the_arrays(engine: Engine, tensors: Arrays) -> None:
    mine = {name: np.array(tensor) for name, tensor in tensors.items()}
    report = engine.update_weights(mine, label="mine").result(60)
    for tensor in mine.values():
        tensor[...] = 7
    assert report.num_tensors == len(mine)
    assert report.num_bytes == sum(tensor.nbytes for tensor in mine.values())


def test_wider_and_narrower_floats_are_converted(engine: Engine, tensors: Arrays) -> None:
    before = bits(engine)
    kinds = [np.float64, np.float32]
    mixed = {name: tensor.astype(kinds[i % 2]) for i, (name, tensor) in enumerate(tensors.items())}
    engine.update_weights(mixed, label="mixed").result(60)
    assert bits(engine) == before
    half = {name: jnp.asarray(tensor, jnp.bfloat16) for name, tensor in tensors.items()}
    whole = {name: np.asarray(tensor).astype(np.float32) for name, tensor in half.items()}
    engine.update_weights(half, label="half").result(60)
    found = bits(engine)
    engine.update_weights(whole, label="whole").result(60)
    assert bits(engine) == found != before
    engine.update_weights(tensors, label="back").result(60)


def test_a_part_of_a_fused_leaf_keeps_the_rest(engine: Engine, tensors: Arrays, golden: Any) -> None:
    before = engine.updater._device.leaves_by_path
    engine.update_weights({UP: -tensors[UP]}, label="part", partial=True).result(60)
    after = engine.updater._device.leaves_by_path
    (path,) = [path for path in before if before[path] is not after[path]]
    rule = next(rule for rule in load_rules(load_config(golden)).rules if rule.sources[0].name == UP)
    assert path == rule.targets[0].path == ("layers", 1, "mlp", "gate_up_proj", "weight")
    gate = tensors[UP.replace("up_proj", "gate_proj")]
    np.testing.assert_array_equal(after[path], np.concatenate([gate, -tensors[UP]]))
    engine.update_weights({UP: tensors[UP]}, label="back", partial=True).result(60)


def test_lazy_tensors_are_asked_for_twice_and_released(engine: Engine, tensors: Arrays) -> None:
    asked = []

    class Lazy(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            asked.append(name)
            return np.array(super().__getitem__(name))

        def items(self) -> Any:
            return [(name, self[name]) for name in self]

    engine.update_weights(Lazy(tensors), label="lazy").result(60)
    assert sorted(asked) == sorted([*tensors, *tensors])


def test_an_array_that_changes_between_check_and_use_is_refused(engine: Engine, tensors: Arrays) -> None:
    class Fickle(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            return super().__getitem__(name)[:5]

    with pytest.raises(InvalidRequest, match=r"tensors\['.*'\]: is F32\[5.*\] now, and was F32"):
        engine.update_weights(Fickle(tensors), label="fickle")


@pytest.mark.parametrize("partial", [True, False])
def test_everything_that_is_wrong_is_listed(engine: Engine, tensors: Arrays, partial: bool) -> None:
    wrong = dict(tensors)
    del wrong["model.norm.weight"]
    wrong["ghost"] = tensors[UP]
    wrong[UP] = tensors[UP][1:]
    wrong["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
    with pytest.raises(TensorsRefused) as refused:
        engine.update_weights(wrong, label="wrong", partial=partial)
    missing = {} if partial else {"model.norm.weight": TensorReason.MISSING}
    assert reasons(refused) == missing | {
        "ghost": TensorReason.UNKNOWN_NAME,
        UP: TensorReason.SHAPE,
        "lm_head.weight": TensorReason.DTYPE,
    }
    assert f"{UP} has shape [111, 48], expected [112, 48]" in str(refused.value)
    assert "lm_head.weight has dtype I8, expected F32 or another one of floats" in str(refused.value)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.bool_, np.complex64])
def test_only_floats_are_converted(engine: Engine, tensors: Arrays, dtype: Any) -> None:
    with pytest.raises(TensorsRefused) as refused:
        engine.update_weights({UP: tensors[UP].astype(dtype)}, label="wrong", partial=True)
    assert reasons(refused) == {UP: TensorReason.DTYPE}


def test_every_value_beyond_the_range_is_found(golden: Any, tensors: Arrays) -> None:
    engine = small_engine(golden, dtype="float16")
    try:
        before = bits(engine)
        wide = {name: np.array(tensor) for name, tensor in tensors.items()}
        for name in (UP, "model.norm.weight"):
            wide[name].flat[-1] = 1e9
        wide["lm_head.weight"].flat[0] = np.inf
        with pytest.raises(TensorsRefused, match="has values beyond the range of F16") as refused:
            engine.update_weights(wide, label="wide")
        assert reasons(refused) == {UP: TensorReason.DTYPE, "model.norm.weight": TensorReason.DTYPE}
        assert bits(engine) == before
    finally:
        engine.shutdown()


def test_a_tied_head_must_be_the_embedding_and_comes_with_it() -> None:
    directory = GOLDEN / "qwen3"
    tensors = tensors_of(directory)
    engine = small_engine(directory)
    try:
        before = bits(engine)
        embedding = "model.embed_tokens.weight"
        head = {"lm_head.weight": tensors[embedding]}
        with pytest.raises(TensorsRefused) as refused:
            engine.update_weights(head, label="head", partial=True)
        assert reasons(refused) == {"lm_head.weight": TensorReason.UNKNOWN_NAME}
        with pytest.raises(InvalidRequest, match=r"tensors: lm_head\.weight differs from model\.embed"):
            engine.update_weights({**tensors, "lm_head.weight": 2 * tensors[embedding]}, label="other")
        with pytest.raises(TensorsRefused, match=r"lm_head\.weight has dtype F64, expected F32"):
            engine.update_weights(
                {**tensors, "lm_head.weight": tensors[embedding].astype(np.float64)}, label="wide"
            )
        inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones((8,), np.float32)}
        whole = {**head, **changed(tensors, 1.0), **inv_freq}
        report = engine.update_weights(whole, label="whole").result(60)
        assert bits(engine) == before
        sha256 = {t.name: hashlib.sha256(whole[t.name].tobytes()).digest() for t in described(whole)}
        expected = digest_of((tensor, sha256[tensor.name]) for tensor in described(whole))
        assert report.digest == engine.updater.digest == expected
    finally:
        engine.shutdown()
