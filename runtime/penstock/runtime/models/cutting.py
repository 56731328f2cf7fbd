"""Cuts a model over the devices of a mesh (Megatron's tensor parallelism, Shoeybi et al. 2019,
arXiv 1909.08053).

Each device runs the same program on its own pieces of the weights and of the cache. The residual stream, and
whatever is not in this table, is the same on all devices.

| part | cut | joined by |
|---|---|---|
| attention: queries, gate, sinks, slopes of ALiBi | by heads | |
| attention: keys, values, their cache | by heads of keys, which repeat if they are fewer than devices | |
| attention: one norm over all heads (OLMo) | by heads | a sum of the squares |
| attention: output product | by its inputs | a sum |
| latent attention: queries, what makes keys and values of a latent | by heads | |
| latent attention: output product | by its inputs | a sum |
| latents and their cache | not | |
| the same, with `context_parallel` | cache dealt by pages | a gather of queries, an all-to-all of sums |
| gated delta net: all but its norm, and its state | by heads, of which those of keys may repeat | |
| Mamba-2 mixer, and its state | by heads, whose groups may repeat | |
| Mamba-2 mixer: the norm of a group that several devices have heads of | by heads | a sum of the squares |
| short convolution, and its state | by channels | |
| these three: output product | by its inputs | a sum |
| MLP, experts, shared expert: gate and up | by inner channels | |
| MLP, experts, shared expert: down | by its inputs | a sum |
| experts, with `expert_parallel` | not, but dealt: each is on one device | the same sum |
| embeddings, also those of each layer, if their size divides | by tokens | a sum of the rows |
| head, if its size divides | by tokens | a gather of the logits |
| encoders: biases of distances | by heads | |
| attention with layer norms of each head | not | |
| routers, other norms, products of embeddings of each layer, encoders of images | not | |
| encoders: tables of positions, types and vectors of distances; classifiers | not | |
"""

from __future__ import annotations

from dataclasses import replace

from penstock.runtime.config import MOST_DEVICES, EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    MLPAndExpertsConfig,
    MLPConfig,
    ModelConfig,
    PerLayerConfig,
)
from penstock.runtime.models.configs.recurrent import (
    DeltaNetConfig,
    MambaConfig,
    RecurrentConfig,
    ShortConvConfig,
)


def cut(
    config: ModelConfig, devices: int, *, expert_parallel: bool = False, context_parallel: bool = False
) -> ModelConfig:
    """Return the model as each of the devices computes it. expert_parallel: experts stay whole, and each
    device has some. context_parallel: each device has some of the cache's pages. ConfigError, which names the
    sizes that would work, if something does not divide; and if there are no experts, no latents, or no
    devices, to deal.
    """
    if expert_parallel:
        _check_experts(config, devices)
    if context_parallel:
        _check_latents(config, devices)
    if devices == 1:
        return config
    _check(config, devices, expert_parallel=expert_parallel)
    return replace(
        config,
        layers=tuple(_layer(layer, devices, expert_parallel, context_parallel) for layer in config.layers),
        devices=devices,
        whole=config,
        predictor=None
        if config.predictor is None
        else _layer(config.predictor, devices, expert_parallel, context_parallel),
        per_layer=_per_layer(config.per_layer, devices),
        vocab_pieces=_pieces_of_tokens(config.vocab_size, devices),
    )


def cut_for(config: ModelConfig, options: EngineConfig, devices: int) -> ModelConfig:
    """`cut` in the ways that the options of a server say."""
    return cut(
        config,
        devices,
        expert_parallel=options.expert_parallel,
        context_parallel=options.context_parallel,
    )


def sizes_that_work(config: ModelConfig, *, expert_parallel: bool = False) -> list[int]:
    """List the numbers of devices over which the model can be cut, from 1 on."""
    return [
        devices for devices in range(1, MOST_DEVICES + 1) if not _problems(config, devices, expert_parallel)
    ]


def _check(config: ModelConfig, devices: int, *, expert_parallel: bool) -> None:
    problems = _problems(config, devices, expert_parallel)
    if problems:
        sizes = sizes_that_work(config, expert_parallel=expert_parallel)
        raise ConfigError(
            f"tensor_parallel_size: {config.architecture} cannot be cut over {devices} devices: "
            f"{'; '.join(problems)}; sizes that would work: {', '.join(map(str, sizes))}"
        )


def _check_experts(config: ModelConfig, devices: int) -> None:
    if not any(isinstance(mlp, ExpertsConfig) for layer in config.layers for mlp in _mlps(layer)):
        raise ConfigError(f"expert_parallel: must be left out: {config.architecture} has no experts here")
    if devices == 1:
        raise ConfigError("expert_parallel: must be left out on one device; see tensor_parallel_size")


def _check_latents(config: ModelConfig, devices: int) -> None:
    attentions = [layer.attention for layer in config.layers]
    if any(isinstance(attention, AttentionConfig) for attention in attentions):
        raise ConfigError(
            f"context_parallel: must be left out: {config.architecture} has attention that is not latent, "
            "whose cache is cut by heads"
        )
    if not any(isinstance(attention, LatentConfig) for attention in attentions):
        raise ConfigError(
            f"context_parallel: must be left out: {config.architecture} has no latent attention"
        )
    if devices == 1:
        raise ConfigError("context_parallel: must be left out on one device; see tensor_parallel_size")


def _problems(config: ModelConfig, devices: int, expert_parallel: bool) -> list[str]:
    found: dict[str, None] = {}  # each once, in order

    def divides(what: str, size: int | None) -> None:
        if size is not None and size % devices:
            found[f"{what} are {size}"] = None

    def repeats_or_divides(what: str, size: int) -> None:
        if devices % size:
            divides(what, size)

    for layer in (*config.layers, *([config.predictor] if config.predictor and config.predicts else ())):
        attention = layer.attention
        if layer.beside is not None:
            divides("mamba_n_heads", layer.beside.num_heads)
            repeats_or_divides("mamba_n_groups", layer.beside.num_groups)
        if isinstance(attention, AttentionConfig) and attention.qk_norm != "layer":
            divides("num_attention_heads", attention.num_heads)
            repeats_or_divides("num_key_value_heads", attention.num_kv_heads)
        elif isinstance(attention, LatentConfig):
            divides("num_attention_heads", attention.num_heads)
        elif isinstance(attention, DeltaNetConfig):
            divides("linear_num_value_heads", attention.num_value_heads)
            repeats_or_divides("linear_num_key_heads", attention.num_key_heads)
        elif isinstance(attention, MambaConfig):
            divides("mamba_n_heads", attention.num_heads)
            repeats_or_divides("mamba_n_groups", attention.num_groups)
        elif isinstance(attention, ShortConvConfig):
            divides("the channels of the convolution (hidden_size)", attention.channels)
        for mlp in _mlps(layer):
            if isinstance(mlp, ExpertsConfig):
                divides("the inner channels of the shared expert", mlp.shared_size)
            if isinstance(mlp, ExpertsConfig) and expert_parallel:
                divides("num_experts", mlp.num_experts)
            else:
                divides("the inner channels (intermediate_size)", mlp.intermediate_size)
    return list(found)


def _mlps(layer: LayerConfig) -> tuple[MLPConfig | ExpertsConfig, ...]:
    mlp = layer.mlp
    if mlp is None:
        return ()
    return (mlp.mlp, mlp.experts) if isinstance(mlp, MLPAndExpertsConfig) else (mlp,)


def _layer(layer: LayerConfig, devices: int, expert_parallel: bool, context_parallel: bool) -> LayerConfig:
    layer = replace(
        layer,
        attention=_attention(layer.attention, devices, devices if context_parallel else 1),
        beside=None if layer.beside is None else _mamba(layer.beside, devices),
    )
    mlp = layer.mlp
    if mlp is None:
        return layer
    if isinstance(mlp, MLPAndExpertsConfig):
        both = MLPAndExpertsConfig(
            mlp=_mlp(mlp.mlp, devices), experts=_experts(mlp.experts, devices, expert_parallel)
        )
        return replace(layer, mlp=both)
    one = _experts(mlp, devices, expert_parallel) if isinstance(mlp, ExpertsConfig) else _mlp(mlp, devices)
    return replace(layer, mlp=one)


def _attention(
    attention: AttentionConfig | LatentConfig | RecurrentConfig, devices: int, cache_pieces: int
) -> AttentionConfig | LatentConfig | RecurrentConfig:
    if isinstance(attention, AttentionConfig) and attention.qk_norm == "layer":
        return attention
    if isinstance(attention, AttentionConfig):
        kv_pieces = min(devices, attention.num_kv_heads)
        return replace(
            attention,
            num_heads=attention.num_heads // devices,
            num_kv_heads=attention.num_kv_heads // kv_pieces,
            pieces=devices,
            kv_pieces=kv_pieces,
        )
    if isinstance(attention, LatentConfig):
        return replace(
            attention,
            num_heads=attention.num_heads // devices,
            pieces=devices,
            cache_pieces=cache_pieces,
        )
    if isinstance(attention, DeltaNetConfig):
        key_pieces = min(devices, attention.num_key_heads)
        return replace(
            attention,
            num_value_heads=attention.num_value_heads // devices,
            num_key_heads=attention.num_key_heads // key_pieces,
            pieces=devices,
            key_pieces=key_pieces,
        )
    if isinstance(attention, MambaConfig):
        return _mamba(attention, devices)
    return replace(attention, channels=attention.channels // devices, pieces=devices)


def _mamba(mixer: MambaConfig, devices: int) -> MambaConfig:
    group_pieces = min(devices, mixer.num_groups)
    return replace(
        mixer,
        num_heads=mixer.num_heads // devices,
        num_groups=mixer.num_groups // group_pieces,
        pieces=devices,
        group_pieces=group_pieces,
    )


def _per_layer(per_layer: PerLayerConfig | None, devices: int) -> PerLayerConfig | None:
    if per_layer is None:
        return None
    return replace(per_layer, pieces=_pieces_of_tokens(per_layer.vocab_size, devices))


def _pieces_of_tokens(vocab_size: int, devices: int) -> int:
    """Say into how many pieces a vocabulary is cut. One whose size does not divide stays whole: models have
    odd ones, and could not be cut at all.
    """
    return 1 if vocab_size % devices else devices


def _mlp(mlp: MLPConfig, devices: int) -> MLPConfig:
    return replace(mlp, intermediate_size=mlp.intermediate_size // devices, pieces=devices)


def _experts(experts: ExpertsConfig, devices: int, expert_parallel: bool) -> ExpertsConfig:
    shared = experts.shared_size
    if shared is not None:
        experts = replace(experts, shared_size=shared // devices, shared_pieces=devices)
    if expert_parallel:
        return replace(experts, expert_pieces=devices)
    return replace(experts, intermediate_size=experts.intermediate_size // devices, pieces=devices)
