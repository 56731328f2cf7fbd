"""`resolve_model` finds the demo, directories and hub ids, and explains why the hub does not give a model."""

from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils._paths import filter_repo_objects

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading import hub
from penstock.runtime.loading.checkpoint import read_config
from penstock.runtime.loading.hub import resolve_model
from penstock.runtime.loading.safetensors_files import find_tensors


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))


def test_a_directory_is_itself(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_directory_comes_before_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name").resolve() == tmp_path / "org" / "name"


def test_demo_is_the_packaged_folder(tmp_path, monkeypatch):
    assert hub.DEMO_DIRECTORY.parent.name == "loading"
    monkeypatch.setattr(hub, "DEMO_DIRECTORY", tmp_path)
    with pytest.raises(ConfigError, match=r"demo model is not installed.*reinstall"):
        resolve_model("demo")
    (tmp_path / "config.json").touch()
    assert resolve_model("demo") == tmp_path


@pytest.mark.parametrize("name", ["/no/such/directory", "gpt2", "a/b/c", "../x", "org/na me", ""])
def test_neither_directory_nor_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no directory here, and no Hugging Face id"):
        resolve_model(name)


def test_a_file_is_not_a_directory(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file; give the directory"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_a_gguf_file_is_a_model_and_a_directory_of_one_is_not(tmp_path):
    path = tmp_path / "model-Q4_K_M.gguf"
    path.touch()
    assert resolve_model(str(path)) == path
    for read in (read_config, find_tensors):
        with pytest.raises(ConfigError, match=r"give the file itself: .*model-Q4_K_M\.gguf"):
            read(tmp_path)


def test_a_hub_id_fetches_what_serving_needs(tmp_path, monkeypatch):
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
    assert asked["repo_id"] == "Qwen/Qwen3-0.6B"
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
              "tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt"]  # fmt: skip
    others = ["pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors",
              "onnx/model.onnx", "onnx/config.json", "README.md", "model.gguf"]  # fmt: skip
    kept = filter_repo_objects(
        wanted + others, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == wanted


def response(status):
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LocalEntryNotFoundError("not there"), "cannot be reached.*and proxy"),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
        (GatedRepoError("403", response=response(403)), "HF_TOKEN"),
        (RepositoryNotFoundError("404", response=response(404)), "does not exist, or is private"),
        (ConnectionError("connection refused\nmore"), "download failed.*ConnectionError: connection refused"),
        (OSError(28, "No space left on device"), "disk space.*No space left"),
        (ValueError(""), "ValueError"),
    ],
)
def test_what_failed_and_what_to_do(monkeypatch, error, said):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match=said) as caught:
        resolve_model("org/name")
    assert "hf download org/name --local-dir DIR" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_a_bug_is_not_reported_as_a_failed_download(monkeypatch):
    def fail(*_, **__):
        raise KeyError("a bug")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(KeyError):
        resolve_model("org/name")
