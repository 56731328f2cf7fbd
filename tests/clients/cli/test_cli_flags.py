"""Every flag of `generate` and `chat`: what it sends, and what it says about an invalid value."""

from __future__ import annotations

import argparse
import json

import pytest
from google.protobuf import text_format

from penstock.cli.__main__ import main
from penstock.cli.calling.flag_table import COMMON, REPORT
from penstock.client import RequestOptions
from penstock.v1 import inference_pb2

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
def asked(server, capsys):
    """Run `generate` and return the request that the server received."""

    def run(*flags):
        code = main(["generate", "p", "--addr", server.addr, *map(str, flags)])
        assert (code, capsys.readouterr().err) == (0, "")
        return server.calls[-1]

    return run


def stream_request(text):
    return text_format.Parse(text, inference_pb2.StreamRequest())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--temperature 0", "sampling { temperature: 0 }"),
        ("--top-p 1 --top-k 0 --min-p 0", "sampling { top_p: 1 top_k: 0 min_p: 0 }"),
        (
            "--presence-penalty -1 --frequency-penalty 0.5 --repetition-penalty 1.5",
            "sampling { presence_penalty: -1 frequency_penalty: 0.5 repetition_penalty: 1.5 }",
        ),
        (
            "--logit-bias 50=-2.5 --logit-bias 7=+4",
            "sampling { logit_bias { key: 50 value: -2.5 } logit_bias { key: 7 value: 4 } }",
        ),
        ("--bad-word no --bad-word never", 'sampling { bad_words: "no" bad_words: "never" }'),
        ("--allow-token 1 --allow-token 2", "sampling { allowed_token_ids: 1 allowed_token_ids: 2 }"),
        ("--seed 18446744073709551615 --n 3", "sampling { seed: 18446744073709551615 n: 3 }"),
        ("--min-tokens 2 --max-tokens 9", "stopping { min_tokens: 2 max_tokens: 9 }"),
        ("--stop A --stop B --include-stop", 'stopping { stop: "A" stop: "B" include_stop: true }'),
        ("--stop-token 3 --stop-token 4", "stopping { stop_token_ids: 3 stop_token_ids: 4 }"),
        ("--ignore-eos", "stopping { ignore_eos: true }"),
        ("--time-limit 1.5", "stopping { time_limit { seconds: 1 nanos: 500000000 } }"),
        ("--special-tokens", "output { skip_special_tokens: false }"),
        ("--regex [0-9]+", 'constraint { regex: "[0-9]+" }'),
        ("--json-object", "constraint { json_object {} }"),
        ("--choice yes --choice no", 'constraint { choice { choices: "yes" choices: "no" } }'),
        ("--truncation reject", "context { truncation: TRUNCATION_REJECT }"),
        (
            "--truncation middle --reserve-tokens 5 --cap-max-tokens",
            "context { truncation: TRUNCATION_MIDDLE reserve_tokens: 5 cap_max_tokens: true }",
        ),
        ("--model m --adapter a", 'model: "m" adapter: "a"'),
        ("--min-weights 4", "min_weights { generation: 4 }"),
        ("--priority -2", "priority: -2"),
        ("--cache-salt s --no-prefix-cache", 'cache { cache_salt: "s" bypass_prefix_cache: true }'),
    ],
)
def test_what_a_flag_sends(asked, flags, text):
    expected = stream_request('prompt: "p" stopping { max_tokens: 256 }')
    expected.MergeFrom(stream_request(text))
    assert asked(*flags.split()) == expected


def test_what_goes_with_json(server, capsys):
    flags = ["--json", "--logprobs", "2", "--prompt-logprobs", "0", "--echo-prompt", "--no-text"]
    assert main(["generate", "p", "--addr", server.addr, *flags, "--no-token-ids"]) == 0
    assert server.calls[0].output == text_format.Parse(
        "logprobs: 2 prompt_logprobs: 0 echo_prompt_token_ids: true text: false token_ids: false",
        inference_pb2.StreamRequest().output,
    )


@pytest.mark.parametrize("inline", [True, False])
def test_a_schema_is_sent_as_it_is_written(asked, tmp_path, inline):
    schema = '{ "type": "object",\n  "required": ["é"] }'
    (tmp_path / "s.json").write_text(schema, encoding="utf-8")
    assert asked("--json-schema", schema if inline else tmp_path / "s.json").constraint.json_schema == schema


def test_a_grammar_is_a_file(asked, tmp_path):
    (tmp_path / "g.lark").write_text("start: /a/\n")
    assert asked("--grammar", tmp_path / "g.lark").constraint.ebnf == "start: /a/\n"


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("value", [[WEATHER], WEATHER, [{"type": "function", "function": WEATHER}]])
def test_tools(asked, tmp_path, value, inline):
    (tmp_path / "t.json").write_text(json.dumps(value))
    flags = ["--tools", json.dumps(value) if inline else tmp_path / "t.json", "--tool-choice", "get_weather"]
    chat = asked(*flags).chat
    assert [(m.role, m.content) for m in chat.messages] == [("user", "p")]
    assert [(t.name, t.description) for t in chat.tools] == [("get_weather", WEATHER["description"])]
    assert json.loads(chat.tools[0].parameters_json) == WEATHER["parameters"]
    assert chat.tool_choice == "get_weather"


def test_one_strict_call(asked):
    chat = asked("--tools", json.dumps({**WEATHER, "strict": True}), "--one-tool-call").chat
    assert chat.tools[0].strict
    assert (chat.HasField("parallel_tool_calls"), chat.parallel_tool_calls) == (True, False)
    chat = asked("--tools", json.dumps(WEATHER)).chat
    assert not chat.tools[0].strict
    assert not chat.HasField("parallel_tool_calls")


def test_the_template_and_its_options_make_it_a_chat(asked, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    flags = ["--chat-template", tmp_path / "t.jinja", "--template-options", '{"thinking": false}']
    chat = asked("--system", "be brief", *flags).chat
    assert [m.role for m in chat.messages] == ["system", "user"]
    assert chat.chat_template == "{{ messages[0].content }}"
    assert json.loads(chat.template_options_json) == {"thinking": False}


NUMBER, WHOLE = "must be a number, not 'x'", "must be a whole number, not '1.5'"
WRONG = [
    ("--temperature", "x", NUMBER),
    ("--temperature", "-1", "must be at least 0 and at most 100, not -1"),
    ("--temperature", "nan", "must be at least 0 and at most 100, not nan"),
    ("--top-p", "0", "must be above 0 and at most 1, not 0"),
    ("--top-k", "1.5", WHOLE),
    ("--top-k", "2147483648", "must be at most 2147483647, not 2147483648"),
    ("--min-p", "1.1", "must be at least 0 and at most 1"),
    ("--presence-penalty", "2.5", "must be at least -2 and at most 2"),
    ("--frequency-penalty", "-3", "must be at least -2 and at most 2"),
    ("--repetition-penalty", "0", "must be above 0, not 0"),
    ("--logit-bias", "5", "must be TOKEN_ID=VALUE, e.g. 50=-2.5, not '5'"),
    ("--logit-bias", "-1=2", "must be 0 or more, not -1"),
    ("--logit-bias", "1=x", NUMBER),
    ("--logit-bias", "1=inf", "must be finite, not inf"),
    ("--bad-word", "", "must not be empty"),
    ("--allow-token", "-1", "must be 0 or more, not -1"),
    ("--seed", "-1", "must be 0 or more, not -1"),
    ("--n", "0", "must be 1 or more, not 0"),
    ("--max-tokens", "0", "must be 1 or more, not 0"),
    ("--max-tokens", "4294967296", "must be at most 4294967295"),
    ("--min-tokens", "-1", "must be 0 or more"),
    ("--stop", "", "must not be empty"),
    ("--stop", "x" * 257, "must have at most 256 characters, not 257"),
    ("--time-limit", "0", "must be above 0"),
    ("--timeout", "0", "must be above 0"),
    ("--truncation", "up", "invalid choice: 'up'"),
    ("--reserve-tokens", "-1", "must be 0 or more"),
    ("--priority", "2147483648", "must be at most 2147483647"),
    ("--logprobs", "-1", "must be 0 or more"),
    ("--regex", "", "must not be empty"),
    ("--tools", "no-such-file", "cannot read no-such-file: No such file"),
    ("--tools", "{]", "the value is not JSON"),
    ("--tools", "[]", "must hold at least one tool"),
    (
        "--tools",
        '[{"nme": "f"}]',
        "tool 0: unknown key 'nme'; a tool has name, description, parameters and strict",
    ),
    ("--tools", '["f"]', "tool 0: must be a mapping, not str"),
    ("--tools", '[{"name": "f"}, {"name": "f"}]', "tool 1: another tool is called 'f', too"),
    ("--tools", '{"name": "f", "parameters": [1]}', "tool 0: parameters must be a JSON Schema"),
    ("--json-schema", "[1]", "must be a JSON Schema"),
    ("--json-schema", '{"a": ', "the value is not JSON: Expecting value"),
    ("--json-schema", "[" * 100_000, "the value is not JSON"),
    ("--template-options", "[1]", "must be a JSON object"),
    ("--chat-template", "no-such-file", "cannot read no-such-file"),
    ("--grammar", ".", "cannot read .: Is a directory"),
    ("--image", "no-such-file", "cannot read no-such-file: No such file"),
    ("--image", ".", "cannot read .: Is a directory"),
    ("--request-id", "x" * 129, "must have at most 128 characters"),
]


@pytest.mark.parametrize(("flag", "value", "message"), WRONG)
def test_a_wrong_value_is_told_before_connecting(capsys, flag, value, message):
    with pytest.raises(SystemExit) as caught:
        main(["generate", "p", "--addr", "127.0.0.1:1", f"{flag}={value}"])
    assert caught.value.code == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "usage: penstock generate [options] [prompt]"
    assert len(shown) == 2
    assert shown[1].startswith(f"penstock generate: error: argument {flag}: ")
    assert message in shown[1]


def test_images_stand_before_the_prompt(asked, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    request = asked(
        "--image", tmp_path / "a", "--image", tmp_path / "b", "--system", "be brief", "--max-tokens", 9
    )
    assert request == stream_request(
        """
        chat {
          messages { role: "system" content: "be brief" }
          messages {
            role: "user" parts { image { data: "a" } } parts { image { data: "b" } } parts { text: "p" }
          }
        }
        stopping { max_tokens: 9 }
        """
    )


def test_a_file_that_is_no_text(tmp_path, capsys):
    (tmp_path / "t").write_bytes(b"\xff")
    with pytest.raises(SystemExit):
        main(["generate", "p", "--chat-template", str(tmp_path / "t")])
    assert "is not a file of UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tool-choice", "f"], "--tool-choice f needs --tools, a JSON file"),
        (["--tool-choice", "required"], "--tool-choice required needs --tools"),
        (["--tools", '{"name": "g"}', "--tool-choice", "f"], "names no tool of --tools, which has g"),
        (["--min-tokens", "300"], "--min-tokens 300 is above --max-tokens 256; raise --max-tokens"),
        (["--stop", "x"] * 17, "--stop was given 17 times; at most 16 are allowed"),
        (["--logprobs", "2"], "--logprobs has an effect only with the whole reply; add --json"),
        (["--echo-prompt"], "--echo-prompt has an effect only with the whole reply; add --json"),
    ],
)
def test_flags_that_do_not_fit_each_other_are_told_before_connecting(capsys, flags, message):
    assert main(["generate", "p", "--addr", "127.0.0.1:1", *flags]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("penstock generate: ")
    assert message in shown
    assert shown.count("\n") == 1


def test_one_form_of_output_at_most(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "p", "--regex", "a", "--choice", "b"])
    assert "argument --choice: not allowed with argument --regex" in capsys.readouterr().err


def test_every_option_has_a_flag():
    """Except for inputs that the command line takes in other ways (prompt, --chat, --system, --image,
    --request-id), and for hidden states, which are bytes for programs.
    """
    offered = {flag.option for group in (*COMMON, REPORT) for flag in group.flags if flag.sent}
    assert set(RequestOptions.__annotations__) - offered == {
        *("token_ids", "media", "messages", "request_id", "hidden_states"),
    }
    assert offered <= set(RequestOptions.__annotations__)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_is_grouped_and_every_flag_says_what_it_does(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    titles = [line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    groups = [group.title for group in COMMON]
    assert [title for title in titles if title in groups] == groups
    assert all(flag.name in shown for group in COMMON for flag in group.flags)
    assert all(flag.help for group in (*COMMON, REPORT) for flag in group.flags)


@pytest.mark.parametrize("group", [*COMMON, REPORT], ids=lambda group: group.title)
def test_help_text_is_no_format_of_argparse(group):
    """An unescaped per cent sign in a help text would break --help."""
    parser = argparse.ArgumentParser()
    for flag in group.flags:
        parser.add_argument(flag.name, help=flag.help)
    assert parser.format_help()
