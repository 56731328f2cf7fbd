"""The table of the flags of `generate` and `chat`, in the groups of --help."""

from __future__ import annotations

from penstock.cli.calling import flag_values as read
from penstock.cli.calling.flags import MAX_STOPS, Flag, Group
from penstock.client import JsonObject, Truncation

_ID = _COUNT = read.whole(0, read.UINT32)
_FROM_1 = read.whole(1, read.UINT32)

CHAT = Group(
    "chat",
    (
        Flag("--system", "a system message", "TEXT", str, sent=False),
        Flag(
            "--image",
            "an image that the (first) question is about, for a model that sees images; may be repeated",
            "FILE",
            read.image,
            to="images",
            repeated=True,
            sent=False,
        ),
        Flag(
            "--tools",
            "functions the model may call: a JSON file, or the JSON itself; a list of "
            '{"name", "description", "parameters", "strict"}, bare or in the form of the OpenAI API',
            "FILE",
            read.tools,
        ),
        Flag(
            "--tool-choice",
            "whether the model may (auto), must not (none) or must (required) call a tool, or the name "
            "of the tool that it must call",
            "CHOICE",
            read.words(),
            unset="auto",
        ),
        Flag(
            "--one-tool-call",
            "end the answer with its first call of a tool",
            to="parallel_tool_calls",
            value=False,
        ),
        Flag("--chat-template", "a Jinja template instead of the model's own", "FILE", read.read_file),
        Flag(
            "--template-options",
            'further variables of the template, e.g. {"enable_thinking": false}, or a file that holds them',
            "JSON",
            read.json_object,
        ),
    ),
)

SAMPLING = Group(
    "sampling",
    (
        Flag("--temperature", "randomness of the choice of tokens; 0 is greedy", "T", read.number(0, 100)),
        Flag(
            "--top-p",
            "keep only the likeliest tokens whose probabilities add up to P; 1 is off",
            "P",
            read.number(high=1, above=0),
        ),
        Flag("--top-k", "keep only the K likeliest tokens; 0 is off", "K", read.whole(0, 2**31 - 1)),
        Flag(
            "--min-p",
            "drop tokens that are less than P times as likely as the likeliest; 0 is off",
            "P",
            read.number(0, 1),
        ),
        Flag(
            "--presence-penalty",
            "make tokens that were already generated less likely, -2 to 2",
            "X",
            read.number(-2, 2),
        ),
        Flag(
            "--frequency-penalty",
            "like --presence-penalty, multiplied by how often the token occurred",
            "X",
            read.number(-2, 2),
        ),
        Flag(
            "--repetition-penalty",
            "make tokens of prompt and output less likely, above 0; 1 is off",
            "X",
            read.number(above=0),
        ),
        Flag(
            "--logit-bias",
            "add VALUE to the logit of token ID; may be repeated",
            "ID=VALUE",
            read.bias,
            repeated=True,
        ),
        Flag(
            "--bad-word",
            "never generate this text; may be repeated",
            "TEXT",
            read.words(),
            to="bad_words",
            repeated=True,
        ),
        Flag(
            "--allow-token",
            "generate only tokens that are allowed in this way; may be repeated",
            "ID",
            _ID,
            to="allowed_token_ids",
            repeated=True,
        ),
        Flag("--seed", "the same seed gives the same answer", "N", read.whole(0, 2**64 - 1)),
        Flag("--n", "generate N outputs, each shown under its number", "N", _FROM_1),
    ),
    "values that are not given are the model's defaults, which `penstock info` shows",
)

STOPPING = Group(
    "the text and its end",
    (
        Flag("--max-tokens", "most tokens to generate", "N", _FROM_1, unset="until the context is full"),
        Flag("--min-tokens", "no end token and no stop ends the output before N tokens", "N", _COUNT),
        Flag(
            "--stop",
            f"end before this text; may be repeated, up to {MAX_STOPS} times",
            "TEXT",
            read.words(256),
            repeated=True,
        ),
        Flag(
            "--stop-token",
            "end before this token; may be repeated",
            "ID",
            _ID,
            to="stop_token_ids",
            repeated=True,
        ),
        Flag("--include-stop", "keep the stop text that ended the output"),
        Flag("--ignore-eos", "go on past the model's end token"),
        Flag("--time-limit", "end after S seconds with what was generated so far", "S", read.number(above=0)),
        Flag("--special-tokens", "show special tokens in the text", to="skip_special_tokens", value=False),
    ),
)

STRUCTURED = Group(
    "structured output",
    (
        Flag(
            "--json-schema",
            "JSON that this schema allows: a file, or the JSON itself",
            "SCHEMA",
            read.json_schema,
            to="constraint",
        ),
        Flag("--json-object", "any JSON object", to="constraint", value=JsonObject()),
        Flag("--regex", "a text that the whole pattern matches", "PATTERN", read.regex, to="constraint"),
        Flag("--grammar", "a sentence of this Lark grammar", "FILE", read.grammar, to="constraint"),
        Flag(
            "--choice",
            "answer with exactly one of the --choice texts",
            "TEXT",
            read.words(),
            to="constraint",
            repeated=True,
        ),
    ),
    "make the answer match one of these:",
    exclusive=True,
)

CONTEXT = Group(
    "context",
    (
        Flag(
            "--truncation",
            "if the prompt is too long: refuse it (reject), or drop its oldest tokens (left), its newest "
            "(right), or those between both ends (middle)",
            parse=str,
            choices=tuple(member.value for member in Truncation),
        ),
        Flag("--reserve-tokens", "room to keep for the answer", "N", _COUNT, unset="--max-tokens, else 1"),
        Flag("--cap-max-tokens", "lower --max-tokens to the room that is left before shortening the prompt"),
    ),
)

REQUEST = Group(
    "request",
    (
        Flag("--model", "fail unless the server serves this model", "NAME", read.words()),
        Flag("--adapter", "a LoRA adapter of the server, by name", "NAME", read.words()),
        Flag("--min-weights", "refuse weights of an older generation", "N", read.whole(0, 2**64 - 1)),
        Flag(
            "--priority",
            "higher priorities run first, if `penstock info` lists the feature priority",
            "N",
            read.whole(-(2**31), 2**31 - 1),
        ),
        Flag(
            "--max-proposed-tokens",
            "most tokens proposed at a time, if `penstock info` shows speculation; 0: none; the answer stays "
            "the same",
            "N",
            read.whole(0, 16),
        ),
        Flag("--cache-salt", "share cached prefixes only with requests that have this salt", "TEXT", str),
        Flag(
            "--no-prefix-cache",
            "neither read from the prefix cache nor add to it",
            to="bypass_prefix_cache",
        ),
    ),
)

COMMON = (CHAT, SAMPLING, STOPPING, STRUCTURED, CONTEXT, REQUEST)
"""The groups of both commands."""

REPORT = Group(
    "with --json",
    (
        Flag("--logprobs", "log-probabilities of the answer, and of the K likeliest tokens", "K", _COUNT),
        Flag(
            "--prompt-logprobs", "log-probabilities of the prompt, and of the K likeliest tokens", "K", _COUNT
        ),
        Flag("--echo-prompt", "token ids of the prompt", to="echo_prompt_token_ids"),
        Flag("--no-token-ids", "leave out the token ids of the answer", to="return_token_ids", value=False),
        Flag(
            "--no-text",
            "leave out the text, and do not decode it",
            to="return_text",
            value=False,
        ),
    ),
)
"""Flags of `generate` whose effect only the whole reply shows."""
