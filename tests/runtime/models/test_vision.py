"""The encoder of images and what it is given, compared with plain numpy and with float32."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.models import params
from penstock.runtime.models.configs.vision import (
    InternConfig,
    PixtralConfig,
    QwenVisionConfig,
    VisionConfig,
)
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.rope import RopeConfig, cos_sin
from penstock.runtime.models.vision.attention import attend_spans
from penstock.runtime.models.vision.encoders import vision_of
from penstock.runtime.models.vision.qwen_inputs import rotary_positions, vision_inputs
from penstock.runtime.requests.images import MediaItem
from tests.support.goldens import GOLDEN

QWEN3 = QwenVisionConfig(
    depth=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    out_size=64,
    patch_size=8,
    image_token_id=5,
    video_token_id=6,
    position_side=8,
    deepstack=(0,),
)
QWEN2_5 = dataclasses.replace(
    QWEN3,
    gated=True,
    rms_norms=True,
    activation="silu",
    patch_bias=False,
    position_side=None,
    deepstack=(),
    window=4,
    full_blocks=(1,),
)
PIXTRAL = PixtralConfig(
    depth=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    out_size=64,
    patch_size=8,
    image_token_id=5,
    merger_eps=1e-5,
)
INTERN = InternConfig(
    depth=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    out_size=64,
    image_size=64,
    patch_size=8,
    image_token_id=5,
    qkv_bias=True,
    qk_norm=True,
)
SIZES = st.integers(1, 7).map(lambda tokens: 2 * tokens)


def image(rows: int, columns: int, start: int = 0, seed: int = 0) -> MediaItem:
    """Make an image of noise, of this many patches."""
    values = np.random.default_rng(seed).standard_normal((rows * columns, QWEN3.patch_features))
    return MediaItem(values.astype(np.float32), (1, rows, columns), b"", start, rows * columns // 4)


def test_tokens_of_images_turn_by_row_and_column_and_text_goes_on_behind_the_longer_side() -> None:
    """Two tokens, an image of 2 x 3 tokens, one token, an image of one, one token; by hand."""
    found = rotary_positions(QWEN3, 11, [image(4, 6, start=2), image(2, 2, start=9)])
    assert found.positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
    ]
    assert found.delta == 8 - 11
    assert rotary_positions(QWEN3, 3, []).positions.tolist() == [[0, 1, 2]] * 3
    with pytest.raises(ValueError, match="tokens 2 to 8"):
        rotary_positions(QWEN3, 7, [image(4, 6, start=2)])


@pytest.mark.parametrize(
    ("items", "bucket", "named"),
    [
        ([image(4, 6)], 20, "24 patches do not fit a bucket of 20"),
        ([], 6, "0 patches do not fit a bucket of 6"),
        ([image(3, 4)], 64, "squares of 2"),
        ([dataclasses.replace(image(4, 6), grid=(1, 4, 4))], 64, "must have patches"),
    ],
)
def test_images_that_do_not_fit_are_refused(items: list[MediaItem], bucket: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        vision_inputs(QWEN3, items, bucket)


@given(sizes=st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=3))
@settings(deadline=None)
def test_patches_keep_their_places_in_whatever_order_they_come(sizes: list[tuple[int, int]]) -> None:
    """Patches carry their own image, row and column as values, which must agree with what is said of
    them."""
    items = []
    for number, (rows, columns) in enumerate(sizes):
        item = image(rows, columns)
        at = 0
        for row in range(0, rows, 2):
            for column in range(0, columns, 2):
                for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
                    item.patches[at, :3] = number, row + down, column + right
                    at += 1
        items.append(item)
    count = sum(rows * columns for rows, columns in sizes)
    for config in (QWEN3, QWEN2_5):
        inputs = vision_inputs(config, items, count + 8)
        own = inputs.patches[:count, :3]
        np.testing.assert_array_equal(inputs.places[:, :count], own[:, 1:].T)
        tokens = own[::4] // (1, 2, 2)
        in_order = tokens if inputs.order is None else tokens[inputs.order[: count // 4]]
        expected = [
            (i, row, column)
            for i, (rows, columns) in enumerate(sizes)
            for row in range(rows // 2)
            for column in range(columns // 2)
        ]
        np.testing.assert_array_equal(in_order, expected)
        groups = [(inputs.frames, own[:, :1])]
        if inputs.windows is not None:
            groups.append((inputs.windows, own // (1, 4, 4)))
        for spans, key in groups:
            same = (key[:, None] == key[None]).all(axis=2)
            numbers = np.arange(count)
            begin, end = spans[:, :count, None]
            np.testing.assert_array_equal((begin <= numbers) & (numbers < end), same)
            np.testing.assert_array_equal(spans[1, count:] - spans[0, count:], 1)


def test_positions_are_interpolated_between_the_corners_of_the_table() -> None:
    inputs = vision_inputs(QWEN3, [image(4, 6)], 24)
    assert inputs.corners is not None
    assert inputs.weights is not None
    table = np.indices((8, 8)).reshape(2, 64).T  # of each position its row and column
    found = (table[inputs.corners] * inputs.weights[..., None]).sum(axis=1)
    expected = inputs.places.T * 7 / np.array([3, 5])
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("block", [7, 16, 64])
def test_attention_within_spans_is_that_of_each_span_alone(block: int) -> None:
    attend = jax.jit(functools.partial(attend_spans, scale=0.5, block=block))
    draw = np.random.default_rng(block)
    for _ in range(5):
        q, k, v = draw.standard_normal((3, 48, 2, 8)).astype(np.float32)
        edges = [0, *sorted(draw.choice(np.arange(1, 48), 5, replace=False)), 48]
        spans = np.repeat(np.stack([edges[:-1], edges[1:]]), np.diff(edges), axis=1).astype(np.int32)
        v[0, 0, 0] = np.nan  # which only the first span may notice
        found = np.asarray(attend(q, k, v, spans))
        assert np.isnan(found[: edges[1]]).all()
        for begin, end in itertools.pairwise(edges[1:]):
            scores = np.einsum("qhd,khd->hqk", q[begin:end], k[begin:end]) * 0.5
            shares = np.exp(scores - scores.max(axis=2, keepdims=True))
            shares /= shares.sum(axis=2, keepdims=True)
            expected = np.einsum("hqk,khd->qhd", shares, v[begin:end])
            np.testing.assert_allclose(found[begin:end], expected, atol=1e-5)


def test_pairs_of_channels_turn_by_time_row_and_column() -> None:
    """In ranges and alternating, beside what each position alone gives."""
    positions = jnp.asarray([[3, 4], [50, 60], [700, 800]], jnp.int32)
    alone = [np.asarray(cos_sin(RopeConfig(), 16, axis)[0]) for axis in positions]
    for config, order in (
        (RopeConfig(sections=(4, 2, 2)), [0, 0, 0, 0, 1, 1, 2, 2]),
        (RopeConfig(sections=(4, 2, 2), interleaved=True), [0, 1, 2, 0, 1, 2, 0, 0]),
    ):
        found = cos_sin(config, 16, positions)[0]
        expected = np.stack([alone[axis][:, pair] for pair, axis in enumerate(order)], axis=1)
        np.testing.assert_array_equal(found, expected)
        same = cos_sin(config, 16, jnp.broadcast_to(positions[0], (3, 2)))[0]
        np.testing.assert_array_equal(same, alone[0])


@pytest.mark.ci
@pytest.mark.parametrize(
    "vision",
    [QWEN3, *(pytest.param(each, marks=pytest.mark.sweep) for each in (QWEN2_5, PIXTRAL, INTERN))],
)
def test_packed_weights_agree_with_float32(vision: VisionConfig) -> None:
    """The kernels leave padding undefined; images do not notice. Encoders are not stored in int8."""
    config = dataclasses.replace(load_config(GOLDEN / "qwen3"), vision=vision)
    tall = 8 if isinstance(vision, InternConfig) else 4
    wide = 8 if isinstance(vision, InternConfig) else 6
    once = slice(None) if isinstance(vision, QwenVisionConfig) else slice(0, QWEN3.patch_features // 2)
    items = [
        dataclasses.replace(item, patches=item.patches[:, once])
        for item in (image(tall, wide, seed=1), image(tall, wide, seed=2))
    ]
    inputs, count = vision_of(vision).inputs(items, 128), np.int32(2 * tall * wide)

    def encode(dtype: str, linear: LinearFormat) -> list[np.ndarray]:
        state = params.random_state(config, dtype, std=0.1, linear=linear)
        leaves = params.state_to_leaves(state)

        def run(leaves: Any) -> Any:
            return params.bind(config, leaves, dtype, linear).encode(inputs, jnp.asarray(count))

        return [np.asarray(one, np.float32)[: count // 4] for one in jax.jit(run)(leaves)]

    exact = encode("float32", PLAIN)
    assert len(exact) == vision.num_outputs
    for linear in (LinearFormat(packed=True), LinearFormat(packed=True, int8=True)):
        for found, expected in zip(encode("bfloat16", linear), exact, strict=True):
            assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    leaves = params.leaf_shapes(config, "bfloat16", LinearFormat(packed=True))
    packed = {path[1]: len(leaf.shape) == 5 for path, leaf in leaves.items() if path[0] == "visual"}
    plain = {part for part, is_packed in packed.items() if not is_packed}
    assert plain <= {"pos_embed", "position_embeddings"}
