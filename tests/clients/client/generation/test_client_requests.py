"""Keyword arguments converted to request messages."""

from __future__ import annotations

from typing import cast

import pytest
from google.protobuf import text_format

from penstock.client import Choice, Image, InvalidRequest, RequestOptions, Truncation, WeightsVersion
from penstock.client.generation.options import CHAT_FIELDS, FIELDS
from penstock.client.generation.requests import fill_request, stream_request
from penstock.v1 import inference_pb2, types_pb2


def build(prompt=None, **options):
    return fill_request(inference_pb2.GenerateRequest(), prompt, cast(RequestOptions, options))


def parsed(text):
    return text_format.Parse(text, inference_pb2.GenerateRequest())


def test_only_what_is_given_is_set():
    assert build("hi") == parsed('prompt: "hi"')
    assert build("hi", temperature=None, stop=None) == parsed('prompt: "hi"')


def test_zero_is_given():
    assert build("", temperature=0.0, top_k=0, seed=0, logprobs=0, ignore_eos=False) == parsed(
        'prompt: "" sampling { temperature: 0 top_k: 0 seed: 0 } output { logprobs: 0 } stopping {}'
    )


def test_every_option_lands_in_its_field():
    request = build(
        token_ids=[1, 2],
        request_id="r",
        model="m",
        adapter="a",
        priority=-3,
        min_weights=7,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        seed=2**64 - 1,
        n=2,
        logit_bias={5: -2.0},
        bad_words=["x"],
        allowed_token_ids=[1, 2],
        max_tokens=9,
        min_tokens=4,
        stop=["a", "b"],
        stop_token_ids=[8],
        ignore_eos=True,
        include_stop=True,
        time_limit=1.5,
        return_text=False,
        return_token_ids=True,
        logprobs=2,
        prompt_logprobs=1,
        skip_special_tokens=False,
        echo_prompt_token_ids=True,
        hidden_states=True,
        max_proposed_tokens=0,
        media=[Image(b"one", "image/png"), Image(b"two")],
        constraint=Choice(["yes", "no"]),
        cache_salt="s",
        bypass_prefix_cache=True,
        truncation="left",
        reserve_tokens=6,
        cap_max_tokens=True,
    )
    assert request == parsed(
        """
        request_id: "r" model: "m" prompt_token_ids { ids: 1 ids: 2 } adapter: "a" priority: -3
        sampling {
          temperature: 0.5 top_p: 0.25 top_k: 3 min_p: 0.125 presence_penalty: 1 frequency_penalty: -1
          repetition_penalty: 1.5 seed: 18446744073709551615 n: 2 logit_bias { key: 5 value: -2 }
          bad_words: "x" allowed_token_ids: 1 allowed_token_ids: 2
        }
        stopping {
          max_tokens: 9 min_tokens: 4 stop: "a" stop: "b" stop_token_ids: 8 ignore_eos: true
          include_stop: true time_limit { seconds: 1 nanos: 500000000 }
        }
        output {
          text: false token_ids: true logprobs: 2 prompt_logprobs: 1 skip_special_tokens: false
          echo_prompt_token_ids: true hidden_states: true
        }
        constraint { choice { choices: "yes" choices: "no" } }
        cache { cache_salt: "s" bypass_prefix_cache: true }
        min_weights { generation: 7 } max_proposed_tokens: 0
        context { truncation: TRUNCATION_LEFT reserve_tokens: 6 cap_max_tokens: true }
        media { data: "one" media_type: "image/png" } media { data: "two" }
        """
    )


@pytest.mark.parametrize(
    ("options", "wire"),
    [
        # Field 12 is a varint; negative values have ten bytes, as of every int32.
        ({"priority": 5}, "60 05"),
        ({"priority": -2}, "60 fe ff ff ff ff ff ff ff ff 01"),
        # Field 10 is a message, with a string in field 1 and a bool in field 2.
        ({"cache_salt": "ab"}, "52 04 0a 02 61 62"),
        ({"bypass_prefix_cache": True}, "52 02 10 01"),
        ({"cache_salt": "ab", "bypass_prefix_cache": True}, "52 06 0a 02 61 62 10 01"),
        # Field 21 is a varint that may be 0.
        ({"max_proposed_tokens": 0}, "a8 01 00"),
        ({"max_proposed_tokens": 16}, "a8 01 10"),
        ({"priority": 0}, ""),
        ({"cache_salt": "", "bypass_prefix_cache": False}, "52 00"),
        ({"priority": None, "cache_salt": None, "bypass_prefix_cache": None}, ""),
    ],
)
def test_bytes_of_priority_cache_options_and_proposals(options, wire):
    """Written by hand from the protobuf encoding; field 3 is the prompt "p"."""
    expected = bytes.fromhex("1a 01 70" + wire)
    assert build("p", **options).SerializeToString(deterministic=True) == expected
    assert stream_request("p", None, cast(RequestOptions, options)).SerializeToString() == expected


@pytest.mark.parametrize("value", [*Truncation, *(member.value for member in Truncation)])
def test_truncation(value):
    name = getattr(value, "value", value).upper()
    assert build("p", truncation=value) == parsed(f'prompt: "p" context {{ truncation: TRUNCATION_{name} }}')


def test_every_truncation_has_a_member():
    contract = {name.removeprefix("TRUNCATION_").lower() for name in types_pb2.Truncation.keys()}  # noqa: SIM118
    assert {member.value for member in Truncation} == contract - {"unspecified"}


def test_min_weights_may_be_a_version_that_a_reply_had():
    assert build("p", min_weights=WeightsVersion("step-7", 7)) == build("p", min_weights=7)


def leaves(descriptor, prefix=""):
    for field in descriptor.fields:
        if field.name in ("prompt", "prompt_token_ids") and not prefix:
            continue
        # Messages that are one value to the caller: TokenIds, Constraint, Duration; of WeightsVersion only
        # its generation.
        nested = field.message_type is not None and field.message_type.name in (
            "ChatPrompt",
            "SamplingParams",
            "StoppingParams",
            "OutputOptions",
            "CacheOptions",
            "ContextOptions",
        )
        if nested:
            yield from leaves(field.message_type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def test_the_whole_contract_can_be_said():
    contract = set(leaves(inference_pb2.GenerateRequest.DESCRIPTOR))
    said = {*FIELDS.values(), *CHAT_FIELDS.values()}
    assert contract == said - {"min_weights.generation"} | {"min_weights"}


def test_the_typed_options_are_the_options():
    assert set(RequestOptions.__annotations__) == {*FIELDS, *CHAT_FIELDS, "token_ids"}


def test_one_stop_string_is_one_stop():
    assert build("p", stop="END").stopping.stop == ["END"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give one of prompt, token_ids and messages"),
        ({"prompt": "a", "token_ids": [1]}, "not prompt and token_ids"),
        ({"prompt": "a", "tools": []}, "tools goes with messages, not with prompt"),
        ({"prompt": "a", "temprature": 1}, "unknown option 'temprature'; did you mean 'temperature'"),
        ({"prompt": "a", "regex": "x"}, r"unknown option 'regex'; use constraint=Regex\(...\)"),
        ({"prompt": "a", "json_schema": {}}, r"use constraint=JsonSchema\(...\)"),
        ({"prompt": "a", "constraint": {"type": "object"}}, r"constraint: give JsonSchema.*, not dict"),
        ({"prompt": "a", "max_tokens": "9"}, "max_tokens: .*str"),
        ({"prompt": "a", "temperature": "hot"}, "temperature: .*str"),
        ({"prompt": "a", "bad_words": "x"}, "bad_words: give a sequence"),
        ({"prompt": "a", "media": [b"x"]}, r"media: give a sequence of Image, such as \[Image\(path\)\]"),
        ({"messages": [], "media": [Image(b"x")]}, "media goes with prompt and token_ids"),
    ],
)
def test_wrong_calls(arguments, message):
    with pytest.raises(TypeError, match=message):
        build(**arguments)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": "\ud800"}, "prompt"),
        ({"token_ids": [2**32]}, "prompt_token_ids.ids"),
    ],
)
def test_an_input_the_wire_cannot_carry_is_told_by_its_own_name(arguments, field):
    with pytest.raises(InvalidRequest) as caught:
        build(**arguments)
    assert [v.field for v in caught.value.violations] == [field]


def test_a_min_tokens_per_message_the_wire_cannot_carry():
    with pytest.raises(InvalidRequest) as caught:
        stream_request("a", -1, {})
    assert [v.field for v in caught.value.violations] == ["min_tokens_per_message"]


def test_values_the_wire_cannot_carry_are_all_listed():
    with pytest.raises(InvalidRequest) as caught:
        build(
            token_ids=[-1],
            max_tokens=-1,
            seed=2**64,
            truncation="up",
            time_limit=float("inf"),
            priority=2**31,
            cache_salt="\ud800",
            temperature=1.0,
        )
    assert [v.field for v in caught.value.violations] == [
        "prompt_token_ids.ids",
        "stopping.max_tokens",
        "sampling.seed",
        "context.truncation",
        "stopping.time_limit",
        "priority",
        "cache.cache_salt",
    ]
    assert caught.value.reason == "INVALID_FIELD"
