"""Every file of a checkpoint is broken in turn. What `penstock serve` starts with and what `penstock check`
asks refuse it with one message, which names the file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.inspection import inspect_checkpoint
from penstock.runtime.loading.served_model import load_model
from tests.runtime.loading.conftest import shard
from tests.support.goldens import CONFIG, GOLDEN
from tests.support.models.toy import toy_backend

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
)
PAGE = b'\n<!DOCTYPE html>\n<html lang="en"><head><title>Sign in</title></head></html>\n'
POINTER_SAID, PAGE_SAID = "is a Git LFS pointer; run git lfs pull", "is a web page"
SHARD, INDEX = "model-00002-of-00003.safetensors", "model.safetensors.index.json"
POOLING, ANSWERS = "1_Pooling/config.json", "2_LogitScore/config.json"
OBJECTS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    POOLING,
    ANSWERS,
    INDEX,
)
TEMPLATE = "chat_template.jinja"
FURTHER = "additional_chat_templates/tool_use.jinja"
ALL = (*OBJECTS, "modules.json", TEMPLATE, FURTHER, SHARD)
BROKEN_TEMPLATE = b"{% for m in messages %}\n{{ m.content }"

FAULTS: list[tuple[str, bytes | None, str]] = [
    *((file, POINTER, POINTER_SAID) for file in ALL),
    *((file, PAGE, PAGE_SAID) for file in ALL),
    *((file, b"{", "") for file in (*OBJECTS, "modules.json")),
    *((file, b"", "") for file in (*OBJECTS, "modules.json")),
    *((file, b'{"a": "\xff"}', "") for file in (*OBJECTS, "modules.json")),
    ("config.json", None, "is not there"),
    ("config.json", b"[]", "must hold a JSON object"),
    ("config.json", b"{}", "architectures must name exactly one architecture"),
    ("config.json", b'{"architectures": ["Qwen2ForCausalLM"]}', "hidden_size: is required"),
    ("generation_config.json", b"[]", "must hold a JSON object"),
    ("generation_config.json", b'{"top_k": -2}', "top_k"),
    ("generation_config.json", b'{"temperature": "hot"}', "temperature"),
    ("generation_config.json", b'{"do_sample": 3}', "do_sample"),
    ("generation_config.json", b'{"eos_token_id": "end"}', "eos_token_id"),
    ("preprocessor_config.json", b"[]", "must hold a JSON object"),
    ("preprocessor_config.json", b'{"image_processor_type": "NoSuch"}', ""),
    ("preprocessor_config.json", b'{"image_processor_type": "Qwen2VLImageProcessor", "size": 3}', ""),
    ("preprocessor_config.json", b'{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 5}', ""),
    ("tokenizer.json", b"[]", "must hold a JSON object"),
    ("tokenizer.json", b"{}", "the tokenizer cannot be loaded from"),
    ("tokenizer_config.json", b"[]", "must hold a JSON object"),
    ("tokenizer_config.json", b'{"chat_template": [3]}', "the tokenizer cannot be loaded from"),
    ("tokenizer_config.json", b'{"chat_template": 3}', "the chat template is not valid"),
    ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "the chat template is not valid in line 1"),
    ("modules.json", b"{}", "must hold a list of modules"),
    ("modules.json", b"[3]", "must hold a list of modules"),
    ("modules.json", b'[{"path": "", "type": "sentence_transformers.models.Dense"}]', "Dense"),
    ("modules.json", b'[{"path": "../other", "type": "models.Pooling"}]', "no folder beside it"),
    ("modules.json", b'[{"path": "/", "type": "models.Pooling"}, {"path": "a/b", "type": ""}]', "names a/b"),
    (POOLING, None, "No such file"),
    (POOLING, b"[]", "must hold a JSON object"),
    (POOLING, b'{"pooling_mode_weightedmean_tokens": true}', "the pooling must be one of"),
    (ANSWERS, b'{"true_token_id": 7, "false_token_id": "no"}', "must be two token ids"),
    (ANSWERS, b'{"true_token_id": 7, "false_token_id": 1000000000}', "must be two token ids"),
    (TEMPLATE, BROKEN_TEMPLATE, "the chat template is not valid in line 2"),
    (TEMPLATE, b"{{ messages | nosuchfilter }}", "nosuchfilter"),
    (FURTHER, BROKEN_TEMPLATE, "the chat template is not valid in line 2"),
    ("chat_template.json", b"[]", "must hold a JSON object"),
    ("chat_template.json", b"{}", "must have the field chat_template"),
    ("chat_template.json", json.dumps({"chat_template": BROKEN_TEMPLATE.decode()}).encode(), "line 2"),
    (SHARD, None, "names 1 of 3 shards that are not there"),
    (SHARD, b"", "is not a complete safetensors file"),
    (SHARD, b"Entry not found", "is not a complete safetensors file"),
    (INDEX, None, "holds neither model.safetensors nor"),
    (INDEX, b"{}", "is not a safetensors index"),
    (INDEX, b'{"weight_map": {"a": "../b.safetensors"}}', "files outside its own directory"),
    (INDEX, b'{"weight_map": {"a": "absent.safetensors"}}', "names 1 of 1 shards that are not there"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a checkpoint that has every kind of file."""
    directory = tmp_path_factory.mktemp("whole") / "model"
    shutil.copytree(GOLDEN / "qwen2_5_vl", directory)
    shard(directory)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_LogitScore": "LogitScore"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (directory / "1_Pooling").mkdir()
    (directory / POOLING).write_text('{"pooling_mode_mean_tokens": true}')
    (directory / "2_LogitScore").mkdir()
    (directory / ANSWERS).write_text('{"true_token_id": 7, "false_token_id": 8}')
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "special_tokens_map.json").write_text("{}")
    (directory / "additional_chat_templates").mkdir()
    shutil.copy(directory / TEMPLATE, directory / FURTHER)
    return directory


def refusal(call: Callable[[], Any]) -> str:
    """Return what the call says as it refuses; empty if it does not."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "content", "said"), FAULTS, ids=[f"{name}-{str(content)[:24]}" for name, content, _ in FAULTS]
)
def test_each_file_is_broken_in_turn(
    whole: Path, tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(whole, directory)
    if b"chat_template" in name.encode() + (content or b"") and name not in (TEMPLATE, FURTHER):
        for newer in (TEMPLATE, FURTHER):  # older places of templates are read where these are absent
            (directory / newer).unlink()
    (directory / name).unlink(missing_ok=True)
    if content is not None:
        (directory / name).write_bytes(content)
    backend = toy_backend(CONFIG)
    checked = refusal(lambda: inspect_checkpoint(directory, CONFIG, backend))
    assert name in checked
    assert said in checked
    assert refusal(lambda: load_model(str(directory), CONFIG, backend)) == checked


def test_the_whole_checkpoint_is_taken(whole: Path) -> None:
    backend = toy_backend(CONFIG)
    assert inspect_checkpoint(whole, CONFIG, backend).has_image_processor
    assert load_model(str(whole), CONFIG, backend).image_processor is not None
