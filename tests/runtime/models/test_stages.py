"""Into which stages the layers of a model are cut, which leaves and entries of the cache each has, and what
is refused.
"""

import dataclasses
import random
import re
from itertools import combinations

import numpy as np
import pytest

from penstock.runtime.building import laid_out
from penstock.runtime.config import CPU_SIZES, EngineConfig, resolve
from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.inspection import inspect_config
from penstock.runtime.models.params import leaf_shapes
from penstock.runtime.models.stages import home_of, largest_groups, stages_of
from penstock.runtime.planning.absent import model_of_shapes
from tests.support.goldens import GOLDEN
from tests.support.models.toy import toy_backend


def with_layers(name, count):
    """Return the config of a golden, with its layers repeated up to so many."""
    config = load_config(GOLDEN / name)
    return dataclasses.replace(config, layers=(config.layers * count)[:count])


@pytest.mark.parametrize(
    ("layers", "stages", "ends"),
    [(4, 2, [2, 4]), (5, 2, [3, 5]), (7, 3, [3, 5, 7]), (3, 3, [1, 2, 3]), (1, 1, [])],
)
def test_the_first_stages_have_one_layer_more_where_it_does_not_divide(layers, stages, ends):
    made = stages_of(with_layers("llama", layers), stages)
    assert [stage.end for stage in made] == ends
    assert [stage.begin for stage in made] == [0, *ends][:-1]
    assert [stage.number for stage in made if stage.is_first] == [0][: len(ends)]
    assert [stage.number for stage in made if stage.is_last] == [stages - 1][: len(ends)]


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_come_first_and_the_head_last_and_a_table_that_is_both_lies_in_both(tied):
    config = dataclasses.replace(with_layers("llama", 4), tie_word_embeddings=tied)
    first, last = stages = stages_of(config, 2)
    paths = ["/".join(map(str, path)) for path in leaf_shapes(config, "float32")]
    of_first = {path for path in paths if first.has(tuple(path.split("/")))}
    of_last = {path for path in paths if last.has(tuple(path.split("/")))}
    assert of_first | of_last == set(paths)
    both = {"vectors", *(["embed_tokens/weight"] if tied else [])}
    assert of_first & of_last == both
    own = {path for path in paths if path.startswith(("layers/0/", "layers/1/"))}
    assert of_first == own | both | {"embed_tokens/weight"}
    assert home_of(stages, ("layers", 3, "mlp")) == 1
    assert home_of(stages, ("vectors",)) == home_of(stages, ("embed_tokens", "weight")) == 0


def test_each_stage_keeps_the_entries_of_its_own_layers():
    """gpt_oss has windows in every other layer; both stages have both groups of layers."""
    config = load_config(GOLDEN / "gpt_oss")

    def arrays(cache):
        return cache.arrays((3, 4), 8, 4, np.dtype(np.float32))

    whole = arrays(config.cache)
    first, last = (stage.cache for stage in stages_of(config, 2))
    middle = (len(config.layers) + 1) // 2
    assert arrays(first) == (*whole[:middle], *((),) * (len(whole) - middle))
    assert arrays(last) == (*((),) * middle, *whole[middle:])
    assert first.windows == last.windows == config.cache.windows
    page = first.page_bytes(8, np.dtype(np.float32)) + last.page_bytes(8, np.dtype(np.float32))
    assert page == config.cache.page_bytes(8, np.dtype(np.float32))


def test_a_page_is_as_large_as_in_the_largest_stage():
    """Three of five layers are in the first stage, each with a key and a value in float32 for 8 tokens."""
    config = with_layers("llama", 5)
    attention = config.layers[0].attention
    (group,) = largest_groups([stage.cache for stage in stages_of(config, 2)], 8, np.dtype(np.float32))
    assert group.page_bytes == 3 * 2 * 8 * attention.num_kv_heads * attention.head_dim * 4


def test_a_mixer_beside_attention_has_the_entry_behind_it():
    """Two of three layers are in the first stage."""
    first, last = stages_of(load_config(GOLDEN / "falcon_h1"), 2)
    assert [first.cache.kept, last.cache.kept] == [range(4), range(4, 6)]
    assert first.cache.slot_bytes == 2 * last.cache.slot_bytes > 0


def test_layers_that_share_keys_and_values_are_in_one_stage():
    """The last two of six layers have those of the layers 2 and 3."""
    config = load_config(GOLDEN / "gemma4")
    assert [layer.shares_kv_of for layer in config.layers] == [None, None, None, None, 2, 3]
    stages = stages_of(config, 2)
    assert [(stage.begin, stage.end) for stage in stages] == [(0, 2), (2, 6)]
    assert [stage.cache.kept for stage in stages] == [range(2), range(2, 4)]
    assert [(stage.begin, stage.end) for stage in stages_of(config, 3)] == [(0, 1), (1, 2), (2, 6)]


@pytest.mark.parametrize("seed", range(40))
def test_a_model_is_cut_wherever_that_can_be(seed):
    """It is refused only if no cut of all keeps layers together that share keys and values."""
    draw = random.Random(seed)
    plain = dataclasses.replace(with_layers("llama", 1).layers[0], shares_kv_of=None)
    layers = [plain]
    for number in range(1, draw.randint(2, 9)):
        owners = [i for i in range(number) if layers[i].shares_kv_of is None]
        shares = draw.choice(owners) if draw.random() < 0.3 else None
        layers.append(dataclasses.replace(plain, shares_kv_of=shares))
    config = dataclasses.replace(with_layers("llama", 1), layers=tuple(layers))

    def holds(begins):
        home = [sum(number >= begin for begin in begins) for number in range(len(layers))]
        return all(
            layer.shares_kv_of is None or home[layer.shares_kv_of] == home[number]
            for number, layer in enumerate(layers)
        )

    for count in range(2, len(layers) + 1):
        if not any(map(holds, combinations(range(1, len(layers)), count - 1))):
            with pytest.raises(ConfigError, match="so stages can begin only at"):
                stages_of(config, count)
            continue
        begins = [stage.begin for stage in stages_of(config, count)]
        assert holds(begins[1:])
        assert begins == sorted({0, *begins})
        assert len(begins) == count


@pytest.mark.parametrize(
    ("name", "stages", "why"),
    [
        ("llama", 9, "cannot be cut into 9 stages: it has"),
        ("qwen2_5_vl", 2, "it reads images"),
        ("encoders/bert", 2, "it generates nothing"),
        ("gemma4", 4, "so stages can begin only at [1, 2]"),
    ],
)
def test_models_that_cannot_be_cut_into_stages(name, stages, why):
    with pytest.raises(ConfigError, match=f"^pipeline_parallel_size: .*{re.escape(why)}"):
        stages_of(load_config(GOLDEN / name), stages)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"speculation": "lookup"}, "speculation: must be auto or off"),
        ({"speculation": "auto", "lookup_text": "demo"}, "lookup_text: must be left out"),
        ({"speculation": "auto", "max_proposed_tokens": 2}, "max_proposed_tokens: must be left out"),
        ({"max_adapters": 2}, "max_adapters: must be 0"),
        ({"compiled": GOLDEN}, "compiled: must be left out"),
        ({"tensor_parallel_size": None}, "tensor_parallel_size: must be a number"),
    ],
)
def test_options_that_do_not_go_with_stages_are_named(options, problem):
    EngineConfig(**options)
    with pytest.raises(ConfigError, match=f"{problem} where pipeline_parallel_size is above 1"):
        EngineConfig(**options, pipeline_parallel_size=2)


def test_nothing_is_proposed_in_stages_where_an_operator_says_nothing_of_speculation():
    options = EngineConfig(pipeline_parallel_size=2, speculation="auto")
    assert resolve(options, CPU_SIZES).max_proposed_tokens is None


def test_stages_keep_rows_as_wide_as_those_of_the_whole_model():
    """On TPUs, and in what `penstock check` says of them."""
    backend = dataclasses.replace(toy_backend(), lanes=128)
    options = EngineConfig(pipeline_parallel_size=2, page_size=16)
    config = load_config(GOLDEN / "llama")
    whole = model_of_shapes(config, EngineConfig(max_model_len=64), backend)
    model = laid_out(dataclasses.replace(whole, stages=stages_of(config, 2)), backend)
    arrays = [cache.arrays((3,), 16, 4, np.dtype(np.float32)) for cache in model.caches]
    assert [[array and array.shape[4] for array in each] for each in arrays] == [[128, ()], [(), 128]]
    told = inspect_config(GOLDEN / "llama" / "config.json", options, backend)
    assert sum(stage.page_bytes for stage in told.stages) == told.page_bytes == 2 * 2 * 2 * 16 * 128 * 4
