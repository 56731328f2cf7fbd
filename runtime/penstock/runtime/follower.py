"""A follower: it loads its part of a model, compiles the leader's programs, and makes the leader's calls."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import jax

from penstock.runtime.building import build
from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import GroupEnded
from penstock.runtime.execution.backend import choose_backend
from penstock.runtime.execution.own_stage import OwnStage
from penstock.runtime.execution.program_set import Programs, StagePrograms
from penstock.runtime.following.facts import program_facts
from penstock.runtime.following.interface import Call, GroupOptions, LeaderLink
from penstock.runtime.following.joining import check_adapters, check_images, joined
from penstock.runtime.following.leading import is_devices
from penstock.runtime.following.repeating import Repeater
from penstock.runtime.following.sharing import FollowedModel, FollowedUpdates
from penstock.runtime.following.stages import StageRepeater
from penstock.runtime.loading.served_model import load_model
from penstock.runtime.updating.update import update_threads


def follow(
    model: str,
    config: EngineConfig,
    options: GroupOptions,
    link: LeaderLink,
    *,
    weights_roots: Sequence[Path] = (),
) -> None:
    """Follow the leader until it stops. `weights_roots`: where files of new weights may lie. ConfigError if
    it is to serve something else, or if the model cannot be loaded; GroupEnded if it, or another process, is
    lost.
    """
    devices = joined(model, config, options, link.meet)
    backend = choose_backend(config, *devices)
    loaded = load_model(model, config, backend)
    parts = build(loaded, config, backend)
    runner = parts.runner
    check_images(runner.config.vision, runner.config.encode_buckets)
    check_adapters(runner.config)
    stage = None if backend.own_stage is None else loaded.stages[backend.own_stage]
    assert loaded.rules_for is not None, "a checkpoint has rules"
    followed = FollowedModel(
        device=runner.device,
        backend=backend,
        rules_for=loaded.rules_for,
        stage=stage,
        threads=update_threads(parts.config.threads),
        roots=weights_roots,
    )
    del loaded, parts  # they hold weights that an update is to free
    updates = FollowedUpdates(followed, link.report)
    repeater: Repeater | StageRepeater
    programs: Programs | StagePrograms
    if isinstance(runner.device, OwnStage):
        programs = runner.device.builder(runner.device.num_pages).compile_stage()
        repeater = StageRepeater(runner, programs, runner.device.links(), updates)
    else:
        programs = runner.compiled()
        repeater = Repeater(runner, programs, updates)
    link.begin(program_facts(runner, programs))
    gc.collect()
    gc.freeze()
    try:
        for record in link.calls():
            if isinstance(record, Call):
                repeater.repeat(record)
            else:
                updates.take(record)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not is_devices(error):
            raise
        raise GroupEnded(f"a collective failed: {error}") from error
