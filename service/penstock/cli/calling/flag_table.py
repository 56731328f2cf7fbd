"""The flags of `generate` and `chat`, by the groups of --help."""

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
            "--tools",
            "functions the model may call: a JSON file, or the JSON itself; a list of "
            '{"name", "description", "parameters"}, bare or in the form of the OpenAI API',
            "FILE",
            read.tools,
        ),
        Flag(
            "--tool-choice",
            "whether it may (auto), must not (none) or must (required) call, or a tool's name: that one",
            "CHOICE",
            read.words(),
            unset="auto",
        ),
        Flag("--chat-template", "a Jinja template instead of the model's own", "FILE", read.read_file),
        Flag(
            "--template-options",
            'further variables of the template, e.g. {"enable_thinking": false}; or a file of them',
            "JSON",
            read.json_object,
        ),
    ),
)

SAMPLING = Group(
    "sampling",
    (
        Flag("--temperature", "0 is greedy", "T", read.number(0, 100)),
        Flag("--top-p", "1 is off", "P", read.number(high=1, above=0)),
        Flag("--top-k", "0 is off", "K", read.whole(0, 2**31 - 1)),
        Flag(
            "--min-p",
            "drop what is less than P times as likely as the likeliest; 0 is off",
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
            "never make this text; may be repeated",
            "TEXT",
            read.words(),
            to="bad_words",
            repeated=True,
        ),
        Flag(
            "--allow-token",
            "make only the tokens allowed so; may be repeated",
            "ID",
            _ID,
            to="allowed_token_ids",
            repeated=True,
        ),
        Flag("--seed", "the same seed gives the same answer", "N", read.whole(0, 2**64 - 1)),
        Flag("--n", "make N outputs, each shown under its number", "N", _FROM_1),
    ),
    "what is not given is the model's own default, which `penstock info` shows",
)

STOPPING = Group(
    "the text and its end",
    (
        Flag("--max-tokens", "most tokens to make", "N", _FROM_1, unset="until the context is full"),
        Flag("--min-tokens", "hold off the end token and stops until then", "N", _COUNT),
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
        Flag("--include-stop", "keep what ended it"),
        Flag("--ignore-eos", "go on past the model's end token"),
        Flag("--time-limit", "end after S seconds with what there is", "S", read.number(above=0)),
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
        Flag("--regex", "a text that the pattern matches whole", "PATTERN", read.regex, to="constraint"),
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
    "force the answer into one of:",
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
        Flag("--cap-max-tokens", "shorten the answer before the prompt"),
    ),
)

REQUEST = Group(
    "request",
    (
        Flag("--model", "fail unless the server serves this model", "NAME", read.words()),
        Flag("--adapter", "a LoRA of the server, by name; no server has any yet", "NAME", read.words()),
        Flag("--min-weights", "refuse weights of an older generation", "N", read.whole(0, 2**64 - 1)),
        Flag(
            "--priority",
            "higher goes first, where `penstock info` lists priority",
            "N",
            read.whole(-(2**31), 2**31 - 1),
        ),
        Flag("--cache-salt", "share cached prefixes only with requests of the same salt", "TEXT", str),
        Flag(
            "--no-prefix-cache",
            "neither read from the prefix cache nor add to it",
            to="bypass_prefix_cache",
        ),
    ),
)

COMMON = (CHAT, SAMPLING, STOPPING, STRUCTURED, CONTEXT, REQUEST)
"""Of both commands."""

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
"""Of `generate`: what only the whole reply shows."""
