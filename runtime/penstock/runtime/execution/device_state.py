"""What a runner keeps on the device: weights, the cache, and the state of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import NamedSharding

from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import AttentionTest, Backend
from penstock.runtime.execution.compilation import compile_all
from penstock.runtime.execution.draft_model import DraftModel
from penstock.runtime.execution.images import Pool, pool_shapes
from penstock.runtime.execution.on_mesh import WHOLE, all_shape, cut_sharding, joined_sharding, own_shape
from penstock.runtime.execution.program_set import ProgramBuilder
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.execution.step_programs import (
    AdapterPool,
    Draft,
    Follower,
    Heads,
    KVCache,
    RebuildFollower,
    Weights,
)
from penstock.runtime.execution.text_guesses import CONTEXT, NO_TOKEN, TextTables, text_tables
from penstock.runtime.models.eagle import HeadOfTarget
from penstock.runtime.models.load_rules import ParamPath
from penstock.runtime.models.stages import Stage
from penstock.runtime.ops.cache_spec import CacheSpec
from penstock.runtime.ops.device_arrays import put_own, zeros, zeros_maker
from penstock.runtime.ops.sampler import RowState


class DeviceState:
    """Programs get all of this as arguments. The cache and the rows' state are donated to each program that
    changes them, and replaced by its results.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        weights: Any,
        cache: CacheSpec,
        config: RunnerConfig,
        backend: Backend,
        draft: DraftModel | None = None,
        *,
        stage: Stage | None = None,
        text: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """`weights`: the model's state on the backend's devices; `graphdef`: its static half (nnx.split).
        `draft`: what guesses what this model makes; None: there is nothing. `stage`: the stage of the model
        that this is the state of, with None in `weights` for the leaves of others; None: the whole model.
        `text`: the tokens by which windows guess, where the configuration says that they do.
        """
        self._stage = stage
        leaves, self._weights_tree = jax.tree.flatten(weights)
        self.leaves: Weights = tuple(leaves)
        """The weights as programs take them."""
        self._homes = [leaf.sharding for leaf in leaves]
        drafted, self._draft_tree = jax.tree.flatten(None if draft is None else draft.weights)
        self.draft_leaves: Weights = tuple(drafted)
        """The draft's weights, which no update changes; () without a draft, and with heads, whose weights are
        among the model's."""
        self._draft_homes = [leaf.sharding for leaf in drafted]
        self.paths = tuple(path for path, leaf in flat_leaves(weights) if leaf is not None)
        """The places of the leaves in the model's state."""
        self.sharding = NamedSharding(backend.mesh, WHOLE)
        """Where whatever programs are given lies, except for weights and cache: all devices have it."""
        self.num_pages: tuple[int, ...] = ()
        """Pages of each group of layers; none before `allocate_cache`."""
        self._graphdef = graphdef
        # Without its weights, which are in the leaves.
        self._draft = None if draft is None else dataclasses.replace(draft, weights=None)
        self._own_cache = cache
        self._cache = cache if draft is None else cache.followed_by(draft.cache)
        self._config = config
        self._backend = backend
        self._kv: KVCache | None = None
        self._make_kv: Callable[[], KVCache] | None = None
        self.rows = self._new_rows()
        self.pool = self._new_pool()
        """The embeddings of images."""
        self.adapters = self._new_adapters()
        """The pool of adapters."""
        self.text: TextTables | None = None
        """The text by which windows guess; None: they guess nothing."""
        if config.text_guesses:
            assert text is not None, "windows guess by a text"
            known = np.where(text < config.vocab_size, text, NO_TOKEN)
            self.text = jax.device_put(text_tables(known, config.text_guesses), self.sharding)
        backend.use_huge_pages((*self.leaves, *self.draft_leaves, *self.adapters))

    @property
    def num_groups(self) -> int:
        """Groups of the model's layers, each of which has page tables of its own."""
        return len(self._own_cache.windows)

    # -- weights --

    @property
    def leaves_by_path(self) -> dict[ParamPath, jax.Array]:
        """The leaves that serve now, by their places in the model's state."""
        return dict(zip(self.paths, self.leaves, strict=True))

    def place(self, path: ParamPath, leaf: npt.NDArray[Any]) -> jax.Array:
        """Put a host array where the leaf at this path lies now; it has what the devices of this process
        have of the leaf. On CPU an aligned array is taken as it is, and must not be written again.
        """
        return put_own(leaf, self.leaves_by_path[path].sharding)

    def replace_leaves(self, new: Mapping[ParamPath, jax.Array | npt.NDArray[Any]]) -> None:
        """Swap in new leaves. They have the old ones' shapes and dtypes, so nothing is compiled again. If
        they are placed as the old ones are, only references are exchanged. While the weights are offloaded,
        the new ones go to host memory too.

        This is checked before anything changes: on ConfigError the old leaves serve on.
        """
        self.leaves = self.leaves_with(new)

    def leaves_with(self, new: Mapping[ParamPath, jax.Array | npt.NDArray[Any]]) -> Weights:
        """Return the leaves that serve after `replace_leaves`, which raises what this does."""
        leaves = dict(zip(self.paths, self.leaves, strict=True))
        for path, after in new.items():
            if path not in leaves:
                raise ConfigError(f"{path} is no leaf of the model")
            before = leaves[path]
            if before.shape != after.shape or before.dtype != after.dtype:
                raise ConfigError(
                    f"the new leaf {path} is {after.dtype}{after.shape}, "
                    f"the model's {before.dtype}{before.shape}"
                )
        for path, after in new.items():
            sharding = leaves[path].sharding
            if not isinstance(after, jax.Array) or after.sharding != sharding:
                after = jax.device_put(after, sharding)
            leaves[path] = after
        return tuple(leaves.values())

    def offload_weights(self) -> int:
        """Move the weights to host memory until `restore_weights`. Returns how many bytes of the device are
        free then, unless other code holds these weights too; 0 where they are in host memory anyway. No
        program can run meanwhile. If this raises, nothing has changed.
        """
        memory = self._backend.host_memory
        if memory is None:
            return 0
        before = (*self.leaves, *self.draft_leaves)
        homes = (*self._homes, *self._draft_homes)
        self._take(_placed(before, [home.with_memory_kind(memory) for home in homes]))
        pairs = zip(before, (*self.leaves, *self.draft_leaves), strict=True)
        return sum(int(leaf.nbytes) for leaf, moved in pairs if leaf is not moved)

    def restore_weights(self) -> None:
        """Move the weights back to the device, if they were offloaded. If this raises, nothing has
        changed.
        """
        self._take(_placed((*self.leaves, *self.draft_leaves), (*self._homes, *self._draft_homes)))

    def _take(self, leaves: Weights) -> None:
        """Have these as the leaves, and then those of the draft."""
        count = len(self.leaves)
        self.leaves, self.draft_leaves = leaves[:count], leaves[count:]

    @property
    def num_devices(self) -> int:
        """How many devices have what is kept here."""
        return len(self.sharding.device_set)

    @property
    def weights_bytes(self) -> int:
        """The size of the weights, wherever they lie, with those of the draft."""
        return sum(int(leaf.nbytes) for leaf in (*self.leaves, *self.draft_leaves))

    # -- the cache --

    @property
    def cache_bytes(self) -> int:
        """The size of the cache; 0 while it is freed."""
        return sum(int(array.nbytes) for array in jax.tree.leaves(self._kv))

    @property
    def kv(self) -> KVCache:
        """The cache. ConfigError where it is not allocated."""
        if self._kv is None:
            raise ConfigError("the KV cache is not initialised")
        return self._kv

    @kv.setter
    def kv(self, kv: KVCache) -> None:
        self._kv = kv

    def allocate_cache(self, num_pages: Sequence[int]) -> None:
        """Allocate the cache, with so many pages in each group of layers, filled with zeros, and free the one
        there was. ConfigError for less than one page.
        """
        if min(num_pages) < 1:
            raise ConfigError(f"the KV cache needs at least one page, not {min(num_pages)}")
        self.free_cache()
        self.num_pages = tuple(num_pages)
        shapes = cut_cache_shapes(self._cache, self._config, self._backend.mesh, num_pages)
        self._make_kv = zeros_maker(shapes, joined_sharding(self._backend.mesh), self._backend.zeros)
        self.restore_cache()

    def free_cache(self) -> int:
        """Free the cache's memory now, and return how many bytes that were."""
        arrays = jax.tree.leaves(self._kv)
        num_bytes = sum(int(array.nbytes) for array in arrays)
        for array in arrays:
            array.delete()
        self._kv = None
        return num_bytes

    def restore_cache(self) -> None:
        """Allocate the cache again, filled with zeros, if it was freed. Compile nothing."""
        if self._kv is None and self._make_kv is not None:
            self._kv = self._make_kv()
            self._backend.use_huge_pages(jax.tree.leaves(self._kv))

    @property
    def decodes_natively(self) -> bool:
        """See `Backend.decodes_natively`, for the model's queries and its cache. A model without attention
        has no kernel to call.
        """
        config = self._config
        return bool(self._own_cache.paged) and holds_for_attention(
            self._backend.decodes_natively,
            self._own_cache,
            dtype=config.dtype,
            kv_dtype=config.kv_dtype,
            page_size=config.page_size,
            num_slots=config.max_num_seqs,
        )

    # -- programs --

    def builder(self, num_pages: tuple[int, ...]) -> ProgramBuilder:
        """Make the programs for a cache of so many pages in each group of layers, which need not be
        allocated.
        """
        return ProgramBuilder(
            config=self._config,
            graphdef=self._graphdef,
            rebuild=self._rebuild,
            weights=self.leaves,
            state=self.rows,
            cache=self._cache,
            num_pages=num_pages,
            kv=cut_cache_shapes(self._cache, self._config, self._backend.mesh, num_pages),
            backend=self._backend,
            sharding=self.sharding,
            pool=self.pool,
            adapters=self.adapters,
            draft=self._draft,
            draft_weights=self.draft_leaves,
            rebuild_follower=_rebuilds(self._draft, self._draft_tree, self._rebuild, self._config.dtype),
            text=self.text,
            stage=self._stage,
        )

    def _rebuild(self, leaves: Weights) -> Any:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._weights_tree, leaves))

    def free(self) -> None:
        """Free all memory that is held, except weights that other code holds too."""
        self.free_cache()
        for array in jax.tree.leaves((self.rows, self.pool, self.adapters, self.text)):
            array.delete()
        self.leaves, self.draft_leaves = (), ()

    def _new_pool(self) -> Pool:
        own = tuple(
            jax.ShapeDtypeStruct(own_shape(leaf.shape, self._backend.mesh), leaf.dtype)
            for leaf in self.leaves
        )
        shapes = _pool_shapes(self._rebuild, own, self._config, self.sharding)
        return tuple(array for each in shapes for array in zeros(each.shape, each.dtype, self.sharding))

    def _new_adapters(self) -> AdapterPool:
        shapes = _cut_adapter_shapes(self._config, self._backend.mesh)
        return tuple(array for each in shapes for array in zeros(each.shape, each.dtype, each.sharding))

    def _new_rows(self) -> RowState:
        made: RowState = zeros_maker(row_shapes(self._cache, self._config, self.sharding), self.sharding)()
        return made


def holds_for_attention(
    asked: AttentionTest,
    cache: CacheSpec,
    *,
    dtype: np.dtype[Any],
    kv_dtype: np.dtype[Any],
    page_size: int,
    num_slots: int,
) -> bool:
    """Return whether a backend says it of every layer that attends."""
    return all(
        asked(
            jax.ShapeDtypeStruct((1, layer.num_queries, layer.head_dim), dtype),
            layer.arrays(1, page_size, num_slots, kv_dtype),
            layer.value_dim,
        )
        for layer in cache.paged
    )


def follower_of(draft: DraftModel, target: Any, model: Any, dtype: jnp.dtype) -> Follower:
    """Return what guesses for a target in this dtype. `model`: the draft, or the EAGLE head, with its
    weights; None for heads of the target.
    """
    num_layers, kept = len(draft.cache.layers), draft.cache.paged[0]
    if model is None:
        return Heads(target, num_layers, dtype, kept.head_dim)
    if draft.taps:
        return Heads(HeadOfTarget(model, target), num_layers, dtype, kept.head_dim, draft.taps)
    return Draft(model, num_layers, num_groups=len(draft.cache.windows), vocab_size=draft.vocab_size)


def flat_leaves(weights: Any) -> list[tuple[ParamPath, jax.Array | None]]:
    """Return the leaves of a model's state with their paths, in the order in which JAX flattens it."""
    leaves = jax.tree.leaves(weights, is_leaf=lambda leaf: leaf is None)
    paths = [cast("ParamPath", path) for path, _ in nnx.to_flat_state(weights)]
    return list(zip(paths, leaves, strict=True))


def builder_of_shapes(
    graphdef: nnx.GraphDef[Any],
    weights: Any,
    cache: CacheSpec,
    config: RunnerConfig,
    backend: Backend,
    num_pages: tuple[int, ...],
    draft: DraftModel | None = None,
    *,
    stage: Stage | None = None,
) -> ProgramBuilder:
    """Make the programs of a model whose `weights` are shapes with shardings, as are those of the draft.
    Nothing is put on a device, so the backend's devices need not be there. `stage`: see `DeviceState`.
    """
    leaves, tree = jax.tree.flatten(weights)
    drafted, draft_tree = jax.tree.flatten(None if draft is None else draft.weights)
    if draft is not None:
        cache, draft = cache.followed_by(draft.cache), dataclasses.replace(draft, weights=None)

    def rebuild(leaves: Weights) -> Any:
        return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))

    sharding = NamedSharding(backend.mesh, WHOLE)
    own = tuple(jax.ShapeDtypeStruct(own_shape(leaf.shape, backend.mesh), leaf.dtype) for leaf in leaves)
    return ProgramBuilder(
        config=config,
        graphdef=graphdef,
        rebuild=rebuild,
        weights=tuple(leaves),
        state=row_shapes(cache, config, sharding),
        cache=cache,
        num_pages=num_pages,
        kv=cut_cache_shapes(cache, config, backend.mesh, num_pages),
        backend=backend,
        sharding=sharding,
        pool=_pool_shapes(rebuild, own, config, sharding),
        adapters=_cut_adapter_shapes(config, backend.mesh),
        draft=draft,
        draft_weights=tuple(drafted),
        rebuild_follower=_rebuilds(draft, draft_tree, rebuild, config.dtype),
        stage=stage,
    )


def _rebuilds(
    draft: DraftModel | None, tree: Any, rebuild: Callable[[Weights], Any], dtype: jax.typing.DTypeLike
) -> RebuildFollower | None:
    """Return what makes a follower of the leaves of the served model and of those of the draft, of which
    `tree` says where they belong; None where nothing guesses.
    """
    if draft is None:
        return None

    def made(leaves: Weights, of_draft: Weights) -> Follower:
        model = None
        if draft.graphdef is not None:
            model = nnx.merge(draft.graphdef, jax.tree.unflatten(tree, of_draft))
        return follower_of(draft, rebuild(leaves), model, jnp.dtype(dtype))

    return made


def _cut_adapter_shapes(config: RunnerConfig, mesh: jax.sharding.Mesh) -> Any:
    """Return the shapes of the pools of adapters of all devices together, with their places."""
    sharding = cut_sharding(mesh)
    return tuple(
        jax.ShapeDtypeStruct(all_shape(each.shape, mesh), each.dtype, sharding=sharding)
        for each in config.adapter_shapes
    )


def row_shapes(cache: CacheSpec, config: RunnerConfig, sharding: jax.sharding.Sharding) -> RowState:
    """Return the shapes, dtypes and places of the rows' state."""

    def array(shape: tuple[int, ...], dtype: jax.typing.DTypeLike = np.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)

    slots, by_token = config.max_num_seqs, (config.num_feature_slots, config.vocab_size)
    return RowState(
        array((slots,)),
        tuple(array((slots, config.pages_per_row)) for _ in cache.windows),
        array(by_token),
        array(by_token, np.float32),
        array((slots,)) if cache.has_state else None,
        array((slots, config.drafted_tokens)) if config.drafted_tokens else None,
        array((slots, CONTEXT)) if config.text_guesses else None,
    )


def cache_shapes(cache: CacheSpec, config: RunnerConfig, num_pages: Sequence[int]) -> KVCache:
    """Return the shapes and dtypes of a cache of so many pages in each group of layers, as a device has
    it.
    """
    return cache.arrays(
        num_pages, config.page_size, config.max_num_seqs, config.kv_dtype, config.num_snapshots
    )


def cut_cache_shapes(
    cache: CacheSpec, config: RunnerConfig, mesh: jax.sharding.Mesh, num_pages: Sequence[int]
) -> KVCache:
    """Return the same of all devices together, with their places."""
    sharding = joined_sharding(mesh)
    joined: KVCache = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(
            (mesh.size * array.shape[0], *array.shape[1:]), array.dtype, sharding=sharding
        ),
        cache_shapes(cache, config, num_pages),
    )
    return joined


def _pool_shapes(
    rebuild: Callable[[Weights], Any], own: Any, config: RunnerConfig, sharding: jax.sharding.Sharding
) -> Any:
    """Return the shapes of the embeddings of images, for weights of these shapes on a device; () without
    images.
    """
    if config.vision is None:
        return ()
    return tuple(
        jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding)
        for each in pool_shapes(rebuild, own, config.vision, config.pool_rows)
    )


def peak_temp_bytes(builder: ProgramBuilder) -> int:
    """Return the memory that the most demanding program needs besides its arguments, in bytes, as XLA reports
    it. This compiles the largest program of each kind.
    """
    config = builder.config
    window = next((key for key in config.buckets.keys() if key.window), None)  # noqa: SIM118 # no mapping
    largest = builder.largest
    jobs = {
        "forward": lambda: builder.forward(largest),
        "choice": lambda: builder.choice(largest.rows),
    }
    if config.checks_proposals:
        jobs["checked choice"] = lambda: builder.checked_choice(config.buckets.decode_rows[-1])
    if window is not None:  # a model that generates nothing has none
        jobs["window"] = lambda: builder.window(window)
    if config.drafted_tokens:
        jobs["guesses"] = lambda: builder.guesses(largest.rows)
    if config.encode_buckets:
        jobs["encode"] = lambda: builder.encode(config.encode_buckets[-1])
    made = compile_all(jobs, threads=config.threads, show_progress=config.show_progress)
    return max(map(bytes_beside_arguments, made.values()))


def _placed(leaves: Weights, shardings: Sequence[jax.sharding.Sharding]) -> Weights:
    """Place the leaves where they are to lie; those that lie there already stay as they are."""
    pairs = zip(leaves, shardings, strict=True)
    placed = tuple(leaf if leaf.sharding == to else jax.device_put(leaf, to) for leaf, to in pairs)
    jax.block_until_ready(placed)
    return placed


def bytes_beside_arguments(program: jax.stages.Compiled) -> int:
    """Count the bytes of scratch memory and of results that do not lie in a donated argument."""
    analysis = program.memory_analysis()
    kinds = (("temp", 1), ("output", 1), ("alias", -1))
    return sum(sign * int(getattr(analysis, f"{kind}_size_in_bytes", 0)) for kind, sign in kinds)
