"""A follower: it loads its part of a model, compiles the leader's programs, and makes the leader's calls."""

from __future__ import annotations

import gc

import jax

from penstock.runtime.building import build
from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import GroupEnded
from penstock.runtime.execution.backend import choose_backend
from penstock.runtime.following.facts import program_facts
from penstock.runtime.following.interface import GroupOptions, LeaderLink
from penstock.runtime.following.joining import joined
from penstock.runtime.following.repeating import Repeater
from penstock.runtime.loading.served_model import load_model


def follow(model: str, config: EngineConfig, options: GroupOptions, link: LeaderLink) -> None:
    """Follow the leader until it stops. ConfigError if it is to serve something else, or if the model cannot
    be loaded; GroupEnded if it, or another process, is lost.
    """
    devices = joined(model, config, options, link.meet)
    backend = choose_backend(config, *devices)
    runner = build(load_model(model, config, backend), config, backend).runner
    programs = runner.compiled()
    repeater = Repeater(runner, programs)
    link.begin(program_facts(runner, programs))
    gc.collect()
    gc.freeze()
    try:
        for call in link.calls():
            repeater.repeat(call)
    except jax.errors.JaxRuntimeError as error:
        raise GroupEnded(f"a collective failed: {error}") from error
