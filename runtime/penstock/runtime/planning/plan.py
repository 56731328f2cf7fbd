"""What a model takes on a machine: its memory, what a step reads and multiplies, and the least time for that.
Only config.json is read, and nothing is computed on a device.

All sizes and times are those of one device; a model that is cut over several has a part on each (`cutting`).

- **Scratch memory**, where no compiler says it, is the most of three that are not needed at one time.
  Attention by XLA gathers the keys and values of a span of positions for each block of queries, in float32
  and twice, and has their scores. The sampler has five float32 for each row and token of the vocabulary. An
  MLP has its inner channels twice and a hidden state, in the model's dtype and in float32.
- **Bytes of a step**: all weights that are multiplied, once; of a table of embeddings that is not the head,
  the tokens' rows; of experts that kernels of ours compute as many as the tokens' choices find on average, if
  all are equally likely, and of others all; the keys and values that rows attend to, and those that are
  written; recurrent state, read and written.
- **Operations**: two for each weight that a token is multiplied by, and for each head and position that it
  attends to, two for each channel of the key and of the value. The head is computed for one token of each
  row. What recurrent layers compute beside their products is not counted.
- **A draft model** adds its weights, and its keys and values of all positions; and to a step what it reads
  and multiplies for these tokens. Its guesses are not counted.
- **Stages** (`pipeline_parallel_size`) differ: sizes are those of the one that holds the fewest tokens, and
  steps those of the slowest. Rows are dealt over as many steps as there are stages, and a decode step stands
  for all of these, because so a row has one token.
- **The least time** is the larger of bytes by the memory's rate and operations by the rate of products. What
  devices tell each other comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from penstock.runtime.config import EngineConfig, ResolvedConfig, accelerator_sizes, resolve
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.kv_sizing import DeviceMemory, check_max_model_len, device_kv_bytes
from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    MLPAndExpertsConfig,
    MLPConfig,
    ModelConfig,
)
from penstock.runtime.models.cutting import cut, cut_for
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.load_rules import ParamPath
from penstock.runtime.models.params import leaf_shapes, model_dtype
from penstock.runtime.models.stages import Stage, stages_of
from penstock.runtime.ops.attention import LONG_SPAN, PREFILL_BLOCK_Q
from penstock.runtime.ops.cache_spec import TPU_LANES, CacheSpec, LatentKV, PagedKV, SlotState, cache_dtype
from penstock.runtime.ops.codes import CodeForm
from penstock.runtime.ops.gpu.forms import FORMS
from penstock.runtime.ops.kv_rows import GPU_LANES
from penstock.runtime.planning.chips import Machine, TpuTarget

SAMPLER_COPIES = 5
"""Arrays of float32 [rows, vocabulary] that the sampler's programs have at a time."""
STATE_BYTES = 8
"""What a feature slot takes for each token of the vocabulary (`RowState`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step of the model takes on each device."""

    tokens: int
    bytes: int
    """That are read and written."""
    operations: int
    least_s: float
    """The time that the device's rates allow."""
    is_bound_by_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A model on a machine. Sizes are those of one device."""

    machine: Machine
    fits: bool
    """Whether the rows have room for their whole context."""
    problem: str | None
    """Why it does not fit, cannot be cut over the devices, or cannot keep its cache as the options say; None:
    it fits."""
    context: int
    rows: int
    weight_bytes: int = 0
    state_bytes: int = 0
    """Of the rows: recurrent state, and what the sampler keeps."""
    temp_bytes: int = 0
    """Scratch memory of the largest program."""
    is_temp_compiled: bool = False
    """Whether XLA says so, rather than the estimate."""
    usable_bytes: int = 0
    """What the engine may take of the device's memory."""
    kv_bytes: int = 0
    """What is left for keys and values."""
    kv_bytes_per_row: int = 0
    """What a row of the whole context needs."""
    kv_tokens: int = 0
    """How many tokens of such rows the cache holds."""
    decode: Step | None = None
    """A step of one token for each row, all at the whole context."""
    prefill: Step | None = None
    """A step of as many prompt tokens as a step can have, of one row from its first token on."""


def plan(
    model: ModelConfig,
    machine: Machine,
    options: EngineConfig,
    *,
    draft: ModelConfig | None = None,
    temp_bytes: int | None = None,
) -> Plan:
    """Plan what the model takes. `options` are those of the server; max_num_seqs is the number of rows, and
    max_model_len the context of each. `draft`: the draft model; None: there is none. temp_bytes: what XLA
    reports; None: it is estimated.

    ConfigError if the options do not suit the model, which must generate.
    """
    check_max_model_len(options, model.max_position_embeddings)
    model.cache.check_dtype(options.kv_cache_dtype)
    context = options.max_model_len or model.max_position_embeddings
    if draft is not None and context > draft.max_position_embeddings:
        most = draft.max_position_embeddings
        raise ConfigError(f"draft_model: it reads at most {most} tokens, and the context is {context}")
    resolved = resolve(options, accelerator_sizes(machine.chip.usable_bytes))
    rows, num_stages = resolved.max_num_seqs, options.pipeline_parallel_size
    try:
        if machine.devices % num_stages:
            raise ConfigError(
                f"pipeline_parallel_size: {machine.devices} devices cannot be dealt to {num_stages} stages"
            )
        model = cut_for(model, options, machine.devices // num_stages).for_context(context)
        stages = stages_of(model, num_stages)
        if draft is not None and options.context_parallel:
            raise ConfigError("draft_model: does not go with context_parallel")
        draft = None if draft is None else cut(draft, machine.devices)
        model.cache.laid_out(_lanes(machine, options)).check_dtype(options.kv_cache_dtype)
    except ConfigError as error:
        return Plan(machine=machine, fits=False, problem=str(error), context=context, rows=rows)
    drafting: tuple[_Parts, ...] = ()
    if draft is not None:
        for_draft = replace(resolved, dtype=model_dtype(model, resolved.dtype).name)
        drafting = (_Parts(draft.for_context(context), for_draft, machine),)
    plans = [
        _plan_of(_Parts(model, resolved, machine, stage), drafting, context, temp_bytes)
        for stage in stages or (None,)
    ]
    decodes, prefills = ([step for step in each if step] for each in zip(*map(_steps, plans), strict=True))
    return replace(
        min(plans, key=_room),
        decode=max(decodes, key=_time),
        prefill=max(prefills, key=_time),
    )


def _room(of_stage: Plan) -> tuple[bool, float, int]:
    """Return what a stage has room for, in an order. One that keeps nothing of tokens has room for all."""
    tokens = of_stage.kv_tokens if of_stage.kv_bytes_per_row else math.inf
    return of_stage.fits, tokens, of_stage.kv_bytes


def _steps(of_stage: Plan) -> tuple[Step | None, Step | None]:
    return of_stage.decode, of_stage.prefill


def _time(step: Step) -> float:
    return step.least_s


def _plan_of(parts: _Parts, drafting: Sequence[_Parts], context: int, temp_bytes: int | None) -> Plan:
    """Plan what a model, or a stage of one, takes on one device, perhaps with a draft."""
    machine, resolved = parts.machine, parts.options
    rows, num_turns = resolved.max_num_seqs, resolved.pipeline_parallel_size
    weights, state = parts.weight_bytes + sum(each.weight_bytes for each in drafting), parts.state_bytes
    temp = max(each.temp_bytes for each in (parts, *drafting)) if temp_bytes is None else temp_bytes
    usable = int(machine.chip.usable_bytes * resolved.hbm_utilization)
    needed = parts.kv_bytes(context) + sum(each.whole_kv_bytes(context) for each in drafting)
    chunk = min(context, resolved.max_num_batched_tokens)
    kv_bytes, problem = 0, None
    try:
        memory = DeviceMemory(machine.chip.usable_bytes, weights + state)
        kv_bytes = device_kv_bytes(memory, resolved.hbm_utilization, temp)
    except ConfigError:
        problem = f"weights, state and scratch memory take {weights + state + temp:,} of {usable:,} bytes"
    if problem is None and rows * needed > kv_bytes:
        problem = f"{rows} rows need {rows * needed:,} bytes of cache, and {kv_bytes:,} are left"
    return Plan(
        machine=machine,
        fits=problem is None,
        problem=problem,
        context=context,
        rows=rows,
        weight_bytes=weights,
        state_bytes=state,
        temp_bytes=temp,
        is_temp_compiled=temp_bytes is not None,
        usable_bytes=usable,
        kv_bytes=kv_bytes,
        kv_bytes_per_row=needed,
        kv_tokens=kv_bytes * context // needed if needed else 0,
        decode=_together(
            [
                _in_turns(each.step(-(-rows // num_turns), context, 1), rows, num_turns)
                for each in (parts, *drafting)
            ]
        ),
        prefill=_together([each.step(1, chunk, chunk) for each in (parts, *drafting)]),
    )


def _has_kernels(machine: Machine, options: EngineConfig) -> bool:
    """Say whether kernels of ours compute attention and experts there, in sizes that they take."""
    target = machine.chip.target
    is_known = isinstance(target, TpuTarget) or ".".join(map(str, target.capability)) in FORMS
    return is_known and options.native != "off"


def _lanes(machine: Machine, options: EngineConfig) -> int:
    """Return what the width of KV rows is a multiple of."""
    if machine.chip.is_tpu:
        return TPU_LANES
    return GPU_LANES if _has_kernels(machine, options) else 1


def _in_turns(step: Step, rows: int, num_turns: int) -> Step:
    """Return what so many steps take, one after the other, that have these rows together."""
    return replace(
        step,
        tokens=rows,
        bytes=step.bytes * num_turns,
        operations=step.operations * num_turns,
        least_s=step.least_s * num_turns,
    )


def _together(steps: Sequence[Step]) -> Step:
    """Add up the same tokens in several models, one after the other."""
    return Step(
        tokens=steps[0].tokens,
        bytes=sum(step.bytes for step in steps),
        operations=sum(step.operations for step in steps),
        least_s=sum(step.least_s for step in steps),
        is_bound_by_memory=steps[0].is_bound_by_memory,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of which a plan is made, for a model as one device has it."""

    model: ModelConfig
    options: ResolvedConfig
    machine: Machine
    stage: Stage | None = None
    """Which of its layers are meant; None: all."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return model_dtype(self.model, self.options.dtype)

    @property
    def kv_dtype(self) -> np.dtype[np.generic]:
        return cache_dtype(self.options.kv_cache_dtype, self.dtype)

    @property
    def cache(self) -> CacheSpec:
        """What the model keeps, as the chip stores it."""
        cache = self.model.cache if self.stage is None else self.stage.cache
        return cache.laid_out(_lanes(self.machine, self.options))

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The layers that are meant."""
        stage = self.stage
        return self.model.layers if stage is None else self.model.layers[stage.begin : stage.end]

    @property
    def chooses(self) -> bool:
        """Whether tokens are chosen here."""
        return self.stage is None or self.stage.is_last

    @property
    def leaves(self) -> dict[ParamPath, jax.ShapeDtypeStruct]:
        quantization = self.options.quantization
        codes = CodeForm(bits=4, zeros=False) if quantization == "int4" else None
        linear = LinearFormat(int8=quantization == "int8", codes=codes)
        shapes = leaf_shapes(self.model, self.dtype, linear)
        return {path: leaf for path, leaf in shapes.items() if self.stage is None or self.stage.has(path)}

    @property
    def weight_bytes(self) -> int:
        """Of one device; the leaves have an entry for each."""
        return sum(_num_bytes(leaf) for leaf in self.leaves.values()) // self.model.devices

    @property
    def state_bytes(self) -> int:
        features = self.options.feature_slots if self.chooses else 0
        of_rows = self.options.max_num_seqs * self.cache.slot_bytes
        return of_rows + features * self.model.vocab_size * STATE_BYTES

    @property
    def temp_bytes(self) -> int:
        """See the module's docstring."""
        options, model = self.options, self.model
        tokens, rows, size = options.max_num_batched_tokens, options.most_rows, self.dtype.itemsize
        wide = max(map(_inner_channels, self.layers))
        of_mlp = tokens * (2 * wide * size + model.hidden_size * (4 + size))
        shapes = (
            (rows, 1, LONG_SPAN.decode),
            (tokens // PREFILL_BLOCK_Q + rows, PREFILL_BLOCK_Q, LONG_SPAN.prefill),
        )
        of_attention = (
            max(
                4 * blocks * span * (2 * 2 * kept.num_kv_heads * kept.head_dim + block_q * _num_scored(layer))
                for layer, kept in self._attending
                for blocks, block_q, span in shapes
            )
            if self._attending
            else 0
        )
        of_sampler = SAMPLER_COPIES * rows * model.vocab_size * 4 if self.chooses else 0
        return max(of_mlp, of_attention, of_sampler)

    @property
    def _attending(self) -> list[tuple[LayerConfig, PagedKV | LatentKV]]:
        """The layers that attend, with what is kept for them."""
        cache, model = self.cache, self.model
        pairs = zip(model.layers, model.cache_entries, strict=True)
        kept = [(layer, cache.layers[entry]) for layer, entry in pairs if cache.keeps(entry)]
        return [(layer, entry) for layer, entry in kept if not isinstance(entry, SlotState)]

    @property
    def _paged(self) -> list[PagedKV | LatentKV]:
        """The layers' caches that have pages."""
        cache = self.cache
        return [
            layer
            for entry, layer in enumerate(cache.layers)
            if cache.keeps(entry) and not isinstance(layer, SlotState)
        ]

    def kv_bytes(self, tokens: int) -> int:
        """Count the bytes of cache of a row of so many tokens."""
        page = self.options.page_size
        return sum(
            -(-_seen(tokens, layer.window) // page) * layer.page_bytes(page, self.kv_dtype)
            for layer in self._paged
        )

    def whole_kv_bytes(self, tokens: int) -> int:
        """Return the same for a draft, whose layers keep all positions, whatever their windows."""
        page = self.options.page_size
        return -(-tokens // page) * sum(layer.page_bytes(page, self.kv_dtype) for layer in self._paged)

    def step(self, rows: int, end: int, count: int) -> Step:
        """Return a step of so many rows, each with its last `count` tokens before the position `end`."""
        page = self.options.page_size
        num_bytes, operations = self._of_weights(rows * count, rows)
        num_bytes += rows * self.cache.slot_bytes  # one copy is read, and the other written
        for layer, kept in self._attending:
            written = count if layer.shares_kv_of is None else 0
            per_token = kept.page_bytes(page, self.kv_dtype) // page
            num_bytes += rows * per_token * (_seen(end, kept.window, count) + written)
            positions = np.arange(end - count, end) + 1
            attended = int(np.minimum(positions, kept.window or end).sum())
            values = kept.head_dim if kept.value_dim is None else kept.value_dim
            operations += rows * attended * _num_heads(layer) * 2 * (kept.head_dim + values)
        chip = self.machine.chip
        by_memory, by_products = num_bytes / chip.bytes_per_s, operations / chip.flops_per_s
        return Step(
            tokens=rows * count,
            bytes=num_bytes,
            operations=operations,
            least_s=max(by_memory, by_products),
            is_bound_by_memory=by_memory >= by_products,
        )

    def _of_weights(self, tokens: int, rows: int) -> tuple[int, int]:
        """Count the bytes of weights that a step reads, and operations with them."""
        model = self.model
        num_bytes = operations = 0.0
        plain = leaf_shapes(model, self.dtype)  # codes do not have the shapes of what they stand for
        draws = _has_kernels(self.machine, self.options) and self.options.quantization in ("none", "int8")
        for path, leaf in self.leaves.items():
            size = _num_bytes(leaf) / model.devices
            products = 2 * math.prod(plain.get(path, leaf).shape) / model.devices
            table = _rows_of_table(model, path)
            is_table = path[0] == "embed_tokens"
            is_head = path[0] == "lm_head" or (is_table and model.tie_word_embeddings and self.chooses)
            if path[0] == "visual":
                continue  # steps read no images
            if is_head:
                num_bytes, operations = num_bytes + size, operations + products * rows
            elif table is not None:
                num_bytes += size * min(1.0, tokens / table)
            elif len(path) == 1:  # a pool of small parameters
                num_bytes += size
            elif "experts" in path:
                share = _share_of_experts(model.layers[int(path[1])])
                num_bytes += size * (1 - (1 - share) ** tokens if draws else 1)
                operations += products * share * tokens
            else:
                num_bytes, operations = num_bytes + size, operations + products * tokens
        return round(num_bytes), round(operations)


def _rows_of_table(model: ModelConfig, path: ParamPath) -> int | None:
    """Tell how many rows a table has of which steps only look up some; None for other leaves."""
    if path[0] == "embed_tokens":
        return model.vocab_size
    if path[0] == "embed_positions":
        return (model.positions_from or 0) + model.max_position_embeddings
    return model.per_layer.vocab_size if path[:2] == ("per_layer", "table") and model.per_layer else None


def _num_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return int(math.prod(leaf.shape) * leaf.dtype.itemsize)


def _seen(end: int, window: int | None, count: int = 1) -> int:
    """Tell how many positions before `end` the last `count` tokens attend to, together."""
    return end if window is None else min(end, window + count - 1)


def _num_heads(layer: LayerConfig) -> int:
    attention = layer.attention
    assert isinstance(attention, AttentionConfig | LatentConfig), "recurrent layers do not attend"
    return attention.num_heads


def _num_scored(layer: LayerConfig) -> int:
    """Of how many heads a device has scores at a time: its own, or all where pages are dealt over devices."""
    attention = layer.attention
    return _num_heads(layer) * (attention.cache_pieces if isinstance(attention, LatentConfig) else 1)


def _experts_of(layer: LayerConfig) -> ExpertsConfig | None:
    mlp = layer.mlp.experts if isinstance(layer.mlp, MLPAndExpertsConfig) else layer.mlp
    return mlp if isinstance(mlp, ExpertsConfig) else None


def _share_of_experts(layer: LayerConfig) -> float:
    """Return the share of a layer's experts that a token has."""
    experts = _experts_of(layer)
    assert experts is not None, "leaves of experts are in layers that have some"
    return experts.per_token / experts.num_experts


def _inner_channels(layer: LayerConfig) -> int:
    """Tell how many inner channels a token has in a layer's MLP and experts, gate and up being one."""
    mlp, experts = layer.mlp, _experts_of(layer)
    dense = mlp.mlp if isinstance(mlp, MLPAndExpertsConfig) else mlp
    of_dense = dense.intermediate_size if isinstance(dense, MLPConfig) else 0
    return of_dense + (0 if experts is None else experts.active_size)
