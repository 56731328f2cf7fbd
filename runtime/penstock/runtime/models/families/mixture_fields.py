"""What config.json of models with experts have in common."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.models.config import ExpertsConfig, RouterConfig
from penstock.runtime.models.hf_fields import Fields


def read_experts_and_choices(
    fields: Fields, names: Sequence[str], count: int, chosen: int
) -> tuple[int, int]:
    """Tell how many experts there are and how many of them a token has; `count` and `chosen` are the
    defaults. `names`: the fields that may have the number of experts, because generations of transformers
    differ.
    """
    found = {name: value for name in names if (value := fields.optional_integer(name)) is not None}
    if len(set(found.values())) > 1:
        fields.problem(names[1], f"{found[names[1]]} contradicts {names[0]} {found[names[0]]}")
    count = next(iter(found.values()), count)
    chosen = fields.integer("num_experts_per_tok", chosen)
    if chosen > count:
        fields.problem("num_experts_per_tok", f"{chosen} is more than the {count} experts")
        chosen = count
    return count, chosen


def read_grouped_experts(
    fields: Fields,
    *,
    count: int,
    inner: int,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    shared: int = 1,
    normalize: bool = True,
) -> ExpertsConfig:
    """Read DeepSeek's experts, which GLM has too: chosen by sigmoids with a correction, maybe in groups, with
    shared ones besides. The arguments are defaults: of the number of experts, the size of each, the number of
    groups and of those that a token may choose from, of what the weights are multiplied by, of the number of
    shared experts, and of whether weights are divided by their sum.
    """
    count, chosen = read_experts_and_choices(fields, ("n_routed_experts", "num_local_experts"), count, 8)
    inner = fields.integer("moe_intermediate_size", inner)
    groups, top_groups = fields.integer("n_group", groups), fields.integer("topk_group", top_groups)
    check_groups(fields, count, chosen, groups, top_groups, least=2)
    return ExpertsConfig(
        num_experts=count,
        per_token=chosen,
        intermediate_size=inner,
        router=RouterConfig(
            score="sigmoid",
            correction=True,
            normalize=fields.boolean("norm_topk_prob", normalize),
            scale=fields.number("routed_scaling_factor", scale),
            num_groups=groups,
            top_groups=top_groups,
        ),
        shared_size=inner * fields.integer("n_shared_experts", shared),
    )


def check_groups(
    fields: Fields, count: int, chosen: int, groups: int, top_groups: int, *, least: int
) -> None:
    """Note a problem unless so many groups of at least `least` experts can be made, of which top_groups have
    the chosen ones.
    """
    if count % groups or (groups > 1 and count // groups < least):
        fields.problem("n_group", f"{groups} groups of at least {least} cannot be made of {count} experts")
    elif top_groups > groups or count // groups * top_groups < chosen:
        fields.problem("topk_group", f"{top_groups} of {groups} groups do not have {chosen} experts")


def read_layer_numbers(fields: Fields, name: str, num_layers: int) -> tuple[int, ...] | None:
    """Read a list of layers' numbers, or None if it is absent or null."""
    value = fields.raw(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(_is_layer(entry, num_layers) for entry in value):
        fields.problem(name, f"must list numbers of the {num_layers} layers, not {value!r}")
        return None
    return tuple(value)


def _is_layer(value: object, num_layers: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < num_layers
