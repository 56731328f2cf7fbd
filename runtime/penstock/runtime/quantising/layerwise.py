"""Computes a model layer by layer, with the weights of one layer in memory at a time, in float32 by XLA.

Texts are int32 [texts, T], and hidden states float32 [texts, T, E].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.layers.inputs import Angles, LayerInputs
from penstock.runtime.models.linear import Linear
from penstock.runtime.models.load_rules import LoadRule, ParamPath, Tensor
from penstock.runtime.models.params import (
    bind,
    leaf_shapes,
    load_rules,
    one_layer,
    rules_of_layer,
    state_of,
    state_to_leaves,
)
from penstock.runtime.models.pools import Pools
from penstock.runtime.ops.attention import AttentionMeta, make_meta, paged_attention
from penstock.runtime.ops.recurrent.operations import XLA_RECURRENT
from penstock.runtime.quantising.grids import Floats

Tokens: TypeAlias = NDArray[np.int32]
Leaves: TypeAlias = tuple[jax.Array, ...]
Grams: TypeAlias = dict[ParamPath, NDArray[np.float64]]
"""The leaf of a product's weight to the sum over all tokens of x^T x [K, K] of what it multiplies."""

_DTYPE = "float32"
_PAGE = 16
_NO_STATE = np.iinfo(np.int32).max
"""An entry past the end of all state, see `SlotState`."""
_LOGITS_AT_ONCE = 1 << 24


class Score(NamedTuple):
    """What the next-token distributions of two models are on the same texts."""

    perplexity: float
    """Of the texts by the first model."""
    other_perplexity: float
    kl: float
    """The mean KL divergence of the second from the first, in nats."""
    agreement: float
    """The share of positions where the likeliest token is the same."""


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """A layer with its weights."""

    leaves: Leaves
    compute: Callable[[Leaves, jax.Array], jax.Array]
    watch: Callable[[Leaves, jax.Array], dict[ParamPath, jax.Array]]

    def advance(self, hidden: Floats) -> None:
        """Replace the hidden states before the layer by those behind it."""
        for text in hidden:
            text[...] = np.asarray(self.compute(self.leaves, jnp.asarray(text)))

    def grams(self, hidden: Floats) -> Grams:
        """Sum up what the layer's products multiply."""
        sums: Grams = {}
        for text in hidden:
            for path, gram in self.watch(self.leaves, jnp.asarray(text)).items():
                sums[path] = sums.get(path, 0.0) + np.asarray(gram, np.float64)
        return sums


class LayerByLayer:
    """The computations of one model. Layers with equal configs share their compiled programs."""

    def __init__(self, config: ModelConfig, most_tokens: int) -> None:
        """most_tokens: the length of the longest text."""
        self.config = config.for_context(most_tokens)
        self._ends = replace(self.config, layers=(), vision=None)
        self._programs: dict[ModelConfig, tuple[Any, Any]] = {}

    def embed(self, texts: Tokens, tensors: Mapping[str, Tensor]) -> Floats:
        """Compute the hidden states before the first layer."""
        leaves = _filled(self._ends, load_rules(self._ends, _DTYPE).rules, tensors)

        @jax.jit
        def embedded(leaves: Leaves, tokens: jax.Array) -> jax.Array:
            meta = _meta(tokens.shape[0])
            return bind(self._ends, leaves, _DTYPE)(tokens, meta.positions, (), (meta,))[0]

        return np.stack([np.asarray(embedded(leaves, jnp.asarray(text))) for text in texts])

    def layer(self, index: int, tensors: Mapping[str, Tensor]) -> BoundLayer:
        """Load a layer."""
        alone = one_layer(self.config, index)
        if alone not in self._programs:
            self._programs[alone] = (jax.jit(_computing(alone)), jax.jit(_watching(alone)))
        rules = rules_of_layer(self.config, index, _DTYPE)
        leaves = _filled(alone, tuple(rules.values()), tensors)
        return BoundLayer(leaves, *self._programs[alone])

    def score(
        self, texts: Tokens, hidden: Floats, other_hidden: Floats, tensors: Mapping[str, Tensor]
    ) -> Score:
        """Compare two models by their hidden states behind the last layer; both have the same head."""
        leaves = _filled(self._ends, load_rules(self._ends, _DTYPE).rules, tensors)

        @jax.jit
        def compared(leaves: Leaves, x: jax.Array, y: jax.Array, following: jax.Array) -> jax.Array:
            model, rows = bind(self._ends, leaves, _DTYPE), jnp.int32(x.shape[0])
            exact, other = (jax.nn.log_softmax(model.logits(of, rows), axis=1) for of in (x, y))
            surprises = [-jnp.take_along_axis(of, following[:, None], axis=1)[:, 0] for of in (exact, other)]
            kl = jnp.sum(jnp.exp(exact) * (exact - other), axis=1)
            same = exact.argmax(axis=1) == other.argmax(axis=1)
            return jnp.stack([*surprises, kl, same.astype(jnp.float32)])

        step = max(1, _LOGITS_AT_ONCE // self.config.vocab_size)
        rows, others = (of[:, :-1].reshape(-1, of.shape[2]) for of in (hidden, other_hidden))
        following = texts[:, 1:].reshape(-1)
        found = [
            np.asarray(
                compared(leaves, *(jnp.asarray(of[at : at + step]) for of in (rows, others, following)))
            )
            for at in range(0, len(rows), step)
        ]
        surprise, other, kl, same = np.concatenate(found, axis=1).astype(np.float64).mean(axis=1)
        return Score(float(np.exp(surprise)), float(np.exp(other)), float(kl), float(same))


def _filled(config: ModelConfig, rules: Sequence[LoadRule], tensors: Mapping[str, Tensor]) -> Leaves:
    """Return the model's leaves; what no rule fills is zeros."""
    leaves = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in leaf_shapes(config, _DTYPE).items()}
    for rule in rules:
        rule.fill(leaves, tensors, 0, rule.num_rows)
    placed = {path: jnp.asarray(leaf) for path, leaf in leaves.items()}
    return state_to_leaves(state_of(config, placed, _DTYPE))


def _meta(num_tokens: int) -> AttentionMeta:
    """Describe one row of so many tokens, from the first position on, in pages of its own."""
    pages = -(-num_tokens // _PAGE)
    past, none = jnp.full((1,), _NO_STATE, jnp.int32), jnp.zeros((1,), jnp.int32)
    return make_meta(
        starts=none,
        q_lens=jnp.full((1,), num_tokens, jnp.int32),
        page_table=jnp.arange(pages, dtype=jnp.int32)[None],
        num_tokens=num_tokens,
        decode_only=False,
        page_size=_PAGE,
        num_pages=pages,
        state_from=past,
        state_to=past,
        state_cut=none,
        state_cut_to=past,
    )


def _run(config: ModelConfig, model: Any, x: jax.Array) -> jax.Array:
    """Run the only layer of a model: x [T, E] -> [T, E]."""
    num_tokens = x.shape[0]
    meta, pages = _meta(num_tokens), -(-num_tokens // _PAGE)
    groups = len(config.cache.windows)
    cache = config.cache.arrays([pages] * groups, _PAGE, 1, np.dtype(_DTYPE))
    inputs = LayerInputs(
        angles=Angles(meta.positions),
        metas=(meta,) * groups,
        attention=paged_attention,
        recurrent=XLA_RECURRENT,
        pools=model.pools,
        shared_kv={},
    )
    empty = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), list(cache))
    y: jax.Array = model.layers[0](x, empty, inputs)[0]
    return y


def _computing(config: ModelConfig) -> Callable[[Leaves, jax.Array], jax.Array]:
    return lambda leaves, x: _run(config, bind(config, leaves, _DTYPE), x)


def _watching(config: ModelConfig) -> Callable[[Leaves, jax.Array], dict[ParamPath, jax.Array]]:
    def watch(leaves: Leaves, x: jax.Array) -> dict[ParamPath, jax.Array]:
        model = bind(config, leaves, _DTYPE)
        seen: dict[ParamPath, jax.Array] = {}
        for path, module in nnx.iter_modules(model.layers[0]):
            if type(module) is Linear:
                _keep_gram(module, cast(ParamPath, ("layers", 0, *path, "weight")), seen)
        _run(config, model, x)
        return seen

    return watch


def _keep_gram(linear: Linear, path: ParamPath, seen: dict[ParamPath, jax.Array]) -> None:
    """Have a product keep x^T x of what it multiplies, while a program is made."""
    product = linear.product

    def watched(x: jax.Array, pools: Pools) -> jax.Array:
        seen[path] = jnp.matmul(x.T, x, precision=jax.lax.Precision.HIGHEST)
        return product(x, pools)

    # A plain attribute: nnx would take the function for a part of the model's structure.
    object.__setattr__(linear, "product", watched)
