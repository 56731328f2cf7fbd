"""What an unset sampling field means: the operator's default, else the model's, else a neutral value."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.requests.sampling import (
    GenerationDefaults,
    ResolvedSampling,
    override_defaults,
    read_generation_defaults,
)

NEUTRAL = GenerationDefaults()
ALL: dict[str, Any] = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "presence_penalty": 1.5,
    "frequency_penalty": -0.5, "repetition_penalty": 1.05,
}  # fmt: skip


def read(folder: Path, file: Any = None, override: dict[str, Any] | None = None) -> GenerationDefaults:
    if file is not None:
        text = file if isinstance(file, str) else json.dumps(file)
        (folder / "generation_config.json").write_text(text)
    return read_generation_defaults(folder, override)


def test_without_a_file_they_are_neutral(tmp_path: Path) -> None:
    """They are also those of a request of the embedding API that sets nothing."""
    assert read(tmp_path) == NEUTRAL
    assert NEUTRAL.sampling() == ResolvedSampling()


def test_every_value_comes_from_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, ALL) == GenerationDefaults(**ALL)
    assert GenerationDefaults(**ALL).sampling() == ResolvedSampling(**ALL)


def test_null_is_unset(tmp_path: Path) -> None:
    assert read(tmp_path, dict.fromkeys(ALL)) == NEUTRAL


def test_the_operators_defaults_override_the_file(tmp_path: Path) -> None:
    override = {"temperature": 0.2, "top_k": 0, "repetition_penalty": None}
    expected = GenerationDefaults(**{**ALL, "temperature": 0.2, "top_k": 0})
    assert read(tmp_path, ALL, override) == expected
    assert override_defaults(GenerationDefaults(**ALL), override) == expected


def test_the_operators_defaults_need_no_file(tmp_path: Path) -> None:
    assert read(tmp_path, override=ALL) == GenerationDefaults(**ALL)


@pytest.mark.parametrize(
    ("file", "override", "temperature"),
    [
        ({"do_sample": False}, {}, 0.0),
        ({"do_sample": False, "temperature": 0.6}, {}, 0.0),
        ({"do_sample": True, "temperature": 0.6}, {}, 0.6),
        ({"temperature": 0.6}, {}, 0.6),  # transformers would be greedy, which is rarely meant
        ({"do_sample": False, "temperature": 0.6}, {"do_sample": True}, 0.6),
        ({"do_sample": False}, {"do_sample": True}, 1.0),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.7}, 0.7),
        ({"temperature": 0.6}, {"do_sample": False}, 0.0),
        ({"temperature": 0.6}, {"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True}, {"do_sample": None}, 1.0),
    ],
)
def test_do_sample(tmp_path: Path, file: Any, override: dict[str, Any], temperature: float) -> None:
    assert read(tmp_path, file, override).temperature == temperature


def test_greedy_by_do_sample_keeps_the_penalties(tmp_path: Path) -> None:
    """As in transformers, penalties apply whether tokens are sampled or not."""
    found = read(tmp_path, {"repetition_penalty": 1.2}, {"do_sample": False, "presence_penalty": 0.5})
    assert found == GenerationDefaults(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature: must be from 0 to 100"),
    ({"temperature": 10**400}, "temperature: must be from 0 to 100"),
    ({"temperature": "0.5"}, "temperature: must be a number, not '0.5'"),
    ({"temperature": True}, "temperature: must be a number, not True"),
    ({"top_k": 1.5}, "top_k: must be a whole number"),
    ({"top_k": -1}, "top_k: must be from 0"),
    ({"top_k": float("inf")}, "top_k: must be a whole number"),
    ({"top_p": 0}, "top_p: must be above 0"),
    ({"top_p": float("nan")}, "top_p: must be above 0"),
    ({"min_p": [0.5]}, "min_p: must be a number"),
    ({"presence_penalty": 2.5}, "presence_penalty: must be from -2 to 2"),
    ({"frequency_penalty": -(10**400)}, "frequency_penalty: must be from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty: must be above 0"),
    ({"do_sample": 0}, "do_sample: must be true or false, not 0"),
    ({"do_sample": "no"}, "do_sample: must be true or false"),
]


@pytest.mark.parametrize(("values", "complaint"), BAD)
def test_bad_values_are_refused_wherever_they_stand(
    tmp_path: Path, values: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as of_file:
        read(tmp_path, values)
    assert complaint in str(of_file.value)
    assert "generation_config.json" in str(of_file.value)
    with pytest.raises(ConfigError) as of_option:
        override_defaults(NEUTRAL, values)
    assert complaint in str(of_option.value)
    with pytest.raises(ConfigError) as of_config:  # refused before a checkpoint is loaded
        EngineConfig(generation_config=values, page_size=3)
    assert complaint in str(of_config.value)
    assert "page_size" in str(of_config.value), "all other violations must be listed too"


def test_a_float_without_fraction_is_an_integer(tmp_path: Path) -> None:
    found = read(tmp_path, {"top_k": 50.0, "temperature": 1})
    assert (found.top_k, found.temperature) == (50, 1.0)
    assert isinstance(found.top_k, int)
    assert isinstance(found.temperature, float)


def test_unknown_names_are_an_error_of_the_operator_only(tmp_path: Path) -> None:
    """A file holds many fields that do not concern sampling, but an operator who names an unknown field has
    made a mistake.
    """
    assert read(tmp_path, {"max_new_tokens": 7, "transformers_version": "4"}) == NEUTRAL
    for config in ({"max_new_tokens": 7, "top_q": 1}, {"temperatur": 1}):
        with pytest.raises(ConfigError, match=", ".join(sorted(config))):
            EngineConfig(generation_config=config)
        with pytest.raises(ConfigError, match="there is temperature, top_k"):
            override_defaults(NEUTRAL, config)


@pytest.mark.parametrize("text", ["{", "[]", "3", ""])
def test_a_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="JSON"):
        read(tmp_path, text)


def test_fields_that_are_not_honoured_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read(tmp_path, {"no_repeat_ngram_size": 3, "typical_p": 1.0, "num_beams": 1})
    assert [r.message for r in caplog.records] == [
        "generation_config.json: no_repeat_ngram_size = 3 is not honoured"
    ]
