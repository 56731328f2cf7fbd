"""Experts of a layer that a checkpoint stacks: a tensor with the rows of gate and, behind them, those of up,
and one of down.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.runtime.models.config import ExpertsConfig, ModelConfig
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt


def where_stacked(
    plain: Callable[[ModelConfig], StoredAt], *, transposed: bool = False
) -> Callable[[ModelConfig], StoredAt]:
    """Return `ModelFamily.stored` of a family of which some checkpoints have their experts stacked
    (`TensorNames.stacked`), and the others where `plain` says.
    """

    def stored(config: ModelConfig) -> StoredAt:
        apart = plain(config)
        return stored_stacked(apart, config, transposed=transposed) if config.names.stacked else apart

    return stored


def stored_stacked(plain: StoredAt, config: ModelConfig, *, transposed: bool) -> StoredAt:
    """Tell where a checkpoint has each parameter whose experts are stacked. plain: where it would have them
    if each expert had its own; it says where all others are. transposed: inputs come before outputs.
    """

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        usual = plain(path, shape)
        if "experts" not in path:
            return usual
        expert, part = path[-3:-1]
        experts = config.layers[int(path[1])].mlp
        assert isinstance(experts, ExpertsConfig)
        assert isinstance(expert, int)
        above = usual.sources[0].name.rsplit(f".{expert}.", 1)[0]
        rows = shape[0] if part == "down_proj" else 2 * shape[0]
        matrix = (shape[1], rows) if transposed else (rows, shape[1])
        return Stored(
            (
                Source(
                    f"{above}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}",
                    (experts.num_experts, *matrix),
                    (expert,),
                    begin=shape[0] if part == "up_proj" else 0,
                    axis=1 if transposed else 0,
                ),
            )
        )

    return stored
