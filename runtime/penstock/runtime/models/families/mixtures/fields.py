"""What config.json of models with experts have in common."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.models.hf_fields import Fields


def read_experts_and_choices(
    fields: Fields, names: Sequence[str], count: int, chosen: int
) -> tuple[int, int]:
    """How many experts there are and how many of them a token has; `count` and `chosen` are the defaults.
    `names`: the fields that may have the number of experts, because generations of transformers differ.
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


def read_layer_numbers(fields: Fields, name: str, num_layers: int) -> tuple[int, ...] | None:
    """A list of layers' numbers, or None if it is absent or null."""
    value = fields.raw(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(_is_layer(entry, num_layers) for entry in value):
        fields.problem(name, f"must list numbers of the {num_layers} layers, not {value!r}")
        return None
    return tuple(value)


def _is_layer(value: object, num_layers: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < num_layers
