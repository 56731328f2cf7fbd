"""Options of bench: text to values, values to EngineConfig and to the command line of `penstock serve`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench import options
from penstock.cli import serve


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


def test_flags():
    given = {"new_thing": True, "old_thing": False, "unset": None, "compilation_cache": None}
    assert options.serve_arguments(given) == ["--new-thing", "--no-old-thing", "--compilation-cache", "off"]
    with pytest.raises(TypeError, match="no_such_option"):
        options.engine_config({"no_such_option": 1})
