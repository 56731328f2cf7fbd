"""Options of bench: from text to values, to EngineConfig, and to the command line of `penstock serve`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from bench.drivers import options
from penstock.runtime.config import EngineConfig
from penstock.server_cli.commands import serve
from penstock.server_cli.serving import serve_flags


def test_parse():
    given = ["page_size=32", "dtype=bfloat16", "max_model_len=null", "show_progress=false"]
    expected = {"page_size": 32, "dtype": "bfloat16", "max_model_len": None, "show_progress": False}
    assert options.parse(given) == expected
    with pytest.raises(ValueError, match="NAME=VALUE"):
        options.parse(["page_size"])


def test_engine_and_server_get_the_same():
    given = {**options.DEFAULTS, "dtype": "bfloat16", "compilation_cache": "/somewhere"}
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    args = parser.parse_args(["serve", "model", *options.serve_arguments(given)])
    config = options.engine_config(given)
    assert args.dtype == config.dtype == "bfloat16"
    assert args.max_num_seqs == config.max_num_seqs == 32
    assert args.kv_cache_bytes == config.kv_cache_bytes == 3 * 2**30
    assert Path(args.compilation_cache) == config.compilation_cache == Path("/somewhere")


OTHERS = {
    "served_model_name": "m",
    "dtype": "float16",
    "quantization": "int8",
    "kv_cache_dtype": "int8",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 1,  # others do not go with some of these
    "expert_parallel": True,
    "context_parallel": True,
    "native": "require",
    "native_folder": "/kernels",
    "threads": 3,
    "feature_slots": 2,
    "max_prefill_chunk": 32,
    "target_itl_s": 0.25,
    "scheduling_policy": "priority",
    "prefix_cache_pages": 7,
    "state_snapshots": 6,
    "overlap": False,
    "metrics": False,
    "max_decode_steps": 5,
    "decode_window_s": 0.5,
    "max_adapters": 2,
    "max_cached_adapters": 5,
    "max_adapter_rank": 32,
    "adapter_experts": True,
    "adapter_dir": "/",
    "speculation": "draft",
    "draft_model": "/draft",
    "lookup_text": None,
    "max_proposed_tokens": 6,
    "compiled": Path("/programs"),
    "switch_interval_s": 0.001,
    "max_queued_requests": 9,
    "page_size": 8,
    "hbm_utilization": 0.5,
    "max_logprobs": 4,
    "max_images": 3,
    "max_image_bytes": 5000,
    "max_image_pixels": 1000,
    "max_image_tokens": 64,
    "media_pool_tokens": 128,
    "max_encode_patches": 256,
    "generation_config": {"temperature": 0.5, "do_sample": True},
    "grammar_time_limit_s": 0.5,
    "tool_call_parser": "hermes",
    "reasoning_parser": "think",
    "compilation_cache": "/programs",
}


def test_every_option_is_the_same_on_the_command_line():
    given = {**options.DEFAULTS, **OTHERS}
    assert set(given) == {field.name for field in dataclasses.fields(EngineConfig)} - {"show_progress"}
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    args = parser.parse_args(["serve", "model", *options.serve_arguments(given)])
    assert serve_flags.engine_config(args) == options.engine_config(given)


def test_flags():
    given = {"new_thing": True, "old_thing": False, "unset": None, "compilation_cache": None}
    assert options.serve_arguments(given) == ["--new-thing", "--no-old-thing", "--compilation-cache", "off"]
    with pytest.raises(TypeError, match="no_such_option"):
        options.engine_config({"no_such_option": 1})
