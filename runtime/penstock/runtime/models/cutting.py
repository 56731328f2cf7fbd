"""Cuts a model over the devices of a mesh (Megatron's tensor parallelism, Shoeybi et al. 2019,
arXiv 1909.08053).

Each device runs the same program on its own pieces of the weights and of the cache. The residual stream, and
whatever is not in this table, is the same on all devices.

| part | cut | joined by |
|---|---|---|
| attention: queries, gate, sinks | by heads | |
| attention: keys, values, their cache | by heads of keys, which repeat if they are fewer than devices | |
| attention: output product | by its inputs | a sum |
| MLP, experts, shared expert: gate and up | by inner channels | |
| MLP, experts, shared expert: down | by its inputs | a sum |
| head, if it is not tied and its size divides | by tokens | a gather of the logits |
| latent attention: queries, what makes keys and values of a latent | by heads | |
| latent attention: output product | by its inputs | a sum |
| latents and their cache | not | |
| attention with one norm over all heads or one for each, recurrent layers | not | |
| embeddings, routers, norms, encoders of pictures | not | |
"""

from __future__ import annotations

from dataclasses import replace

from penstock.runtime.config import MOST_DEVICES
from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    MLPAndExpertsConfig,
    MLPConfig,
    ModelConfig,
)


def cut(config: ModelConfig, devices: int) -> ModelConfig:
    """The model as each of the devices computes it. ConfigError, which names the sizes that would work, if
    something does not divide.
    """
    if devices == 1:
        return config
    _check(config, devices)
    return replace(
        config,
        layers=tuple(_layer(layer, devices) for layer in config.layers),
        devices=devices,
        whole=config,
        head_pieces=1 if config.tie_word_embeddings or config.vocab_size % devices else devices,
    )


def sizes_that_work(config: ModelConfig) -> list[int]:
    """The numbers of devices over which the model can be cut, from 1 on."""
    return [devices for devices in range(1, MOST_DEVICES + 1) if not _problems(config, devices)]


def _check(config: ModelConfig, devices: int) -> None:
    problems = _problems(config, devices)
    if problems:
        raise ConfigError(
            f"tensor_parallel_size: {config.architecture} cannot be cut over {devices} devices: "
            f"{'; '.join(problems)}; sizes that would work: {', '.join(map(str, sizes_that_work(config)))}"
        )


def _problems(config: ModelConfig, devices: int) -> list[str]:
    found: dict[str, None] = {}  # each once, in order

    def divides(what: str, size: int | None) -> None:
        if size is not None and size % devices:
            found[f"{what} are {size}"] = None

    for layer in config.layers:
        attention = layer.attention
        if isinstance(attention, AttentionConfig) and _is_cut(attention):
            divides("num_attention_heads", attention.num_heads)
            if devices % attention.num_kv_heads:
                divides("num_key_value_heads", attention.num_kv_heads)
        if isinstance(attention, LatentConfig):
            divides("num_attention_heads", attention.num_heads)
        for mlp in _mlps(layer):
            divides("the inner channels (intermediate_size)", mlp.intermediate_size)
            if isinstance(mlp, ExpertsConfig):
                divides("the inner channels of the shared expert", mlp.shared_size)
    return list(found)


def _is_cut(attention: AttentionConfig) -> bool:
    """Whether attention is cut. One norm over the channels of all heads would need a sum of its own, and the
    weights of norms of each head are not cut.
    """
    return attention.qk_norm not in ("all", "layer")


def _mlps(layer: LayerConfig) -> tuple[MLPConfig | ExpertsConfig, ...]:
    mlp = layer.mlp
    return (mlp.mlp, mlp.experts) if isinstance(mlp, MLPAndExpertsConfig) else (mlp,)


def _layer(layer: LayerConfig, devices: int) -> LayerConfig:
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, AttentionConfig) and _is_cut(attention):
        kv_pieces = min(devices, attention.num_kv_heads)
        attention = replace(
            attention,
            num_heads=attention.num_heads // devices,
            num_kv_heads=attention.num_kv_heads // kv_pieces,
            pieces=devices,
            kv_pieces=kv_pieces,
        )
    if isinstance(attention, LatentConfig):
        attention = replace(attention, num_heads=attention.num_heads // devices, pieces=devices)
    if isinstance(mlp, MLPAndExpertsConfig):
        both = MLPAndExpertsConfig(mlp=_mlp(mlp.mlp, devices), experts=_experts(mlp.experts, devices))
        return replace(layer, attention=attention, mlp=both)
    one = _experts(mlp, devices) if isinstance(mlp, ExpertsConfig) else _mlp(mlp, devices)
    return replace(layer, attention=attention, mlp=one)


def _mlp(mlp: MLPConfig, devices: int) -> MLPConfig:
    return replace(mlp, intermediate_size=mlp.intermediate_size // devices, pieces=devices)


def _experts(experts: ExpertsConfig, devices: int) -> ExpertsConfig:
    shared = experts.shared_size
    return replace(
        experts,
        intermediate_size=experts.intermediate_size // devices,
        shared_size=None if shared is None else shared // devices,
        pieces=devices,
    )
