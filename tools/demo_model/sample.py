"""Sample from the written checkpoint through the training forward, and measure what the README states.

    python -m tools.demo_model.sample runtime/penstock/runtime/loading/demo_model [--stories 4]

The path is independent of the engine: bf16 weights widened to float32, no cache, one full forward per token.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerBase

from tools.demo_model.export import read_checkpoint
from tools.demo_model.model import ModelConfig, Params, forward
from tools.demo_model.phrases import words
from tools.demo_model.tokenizer import END_OF_TEXT, IM_END, load_tokenizer

UNSEEN_CITIES = words("unseen_cities")
"""Cities that the grammar does not list: a right call is a copy."""

WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@partial(jax.jit, static_argnames="config")
def _last_logits(params: Params, tokens: jax.Array, lengths: jax.Array, config: ModelConfig) -> jax.Array:
    logits = forward(params, tokens, jnp.zeros_like(tokens), config)
    return logits[jnp.arange(tokens.shape[0]), lengths - 1]


@dataclass(frozen=True)
class Model:
    """A checkpoint with its tokenizer, and text in, text out."""

    params: Params
    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, directory: Path) -> Model:
        """Read the directory that training wrote."""
        params, config = read_checkpoint(directory)
        return cls(params, config, load_tokenizer(directory))

    def complete(
        self, prompts: Sequence[str], max_new: int = 64, temperature: float = 0.0, seed: int = 0
    ) -> list[str]:
        """Continue each prompt until an end token or `max_new` tokens; temperature 0 is greedy."""
        ends = {self.tokenizer.convert_tokens_to_ids(token) for token in (IM_END, END_OF_TEXT)}
        rows = [list(self.tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts]
        starts, live, random = [len(row) for row in rows], set(range(len(rows))), np.random.default_rng(seed)
        for _ in range(max_new):
            width = 32
            while width < max(map(len, rows)):
                width *= 2
            tokens = np.zeros((len(rows), width), np.int32)
            for index, row in enumerate(rows):
                tokens[index, : len(row)] = row
            lengths = jnp.asarray([len(row) for row in rows])
            logits = np.asarray(_last_logits(self.params, jnp.asarray(tokens), lengths, self.config))
            if temperature > 0:
                logits = logits / temperature + random.gumbel(size=logits.shape)
            for index, token in enumerate(logits.argmax(-1).tolist()):
                if index in live:
                    if token in ends:
                        live.discard(index)
                    else:
                        rows[index].append(token)
            if not live:
                break
        return [str(self.tokenizer.decode(row[start:])) for row, start in zip(rows, starts, strict=True)]

    def chat(
        self, chats: Sequence[list[dict[str, Any]]], tools: list[Any] | None = None, **options: Any
    ) -> list[str]:
        """Return the assistant's next message of each chat, through the chat template."""
        render = partial(self.tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False)
        return self.complete([str(render(messages, tools=tools)) for messages in chats], **options)

    def ask(self, questions: Sequence[str], **options: Any) -> list[str]:
        """Ask single questions, and return the answers."""
        return self.chat([[{"role": "user", "content": question}] for question in questions], **options)


def score_sums(model: Model, pattern: str) -> float:
    """Compute the share of right answers over all 441 pairs of 0..20, greedy."""
    pairs = [(a, b) for a in range(21) for b in range(21)]
    answers = model.ask([pattern.format(a=a, b=b) for a, b in pairs], max_new=14)
    right = [
        re.findall(r"\d+", text)[-1:] == [str(a + b)] for (a, b), text in zip(pairs, answers, strict=True)
    ]
    return float(np.mean(right))


def score_counts(model: Model) -> tuple[float, list[str]]:
    """Return (share right, wrong answers) over count-to and count-from questions, greedy."""
    cases = [(f"Count to {n}.", 1, n) for n in range(2, 21)] + [(f"count to {n}", 1, n) for n in range(2, 21)]
    cases += [(f"Count from {a} to {a + k}.", a, a + k) for a in range(0, 21, 2) for k in (3, 6, 11)]
    answers = model.ask([question for question, _, _ in cases], max_new=80)
    wrong = [
        f"{question} {text}"
        for (question, a, b), text in zip(cases, answers, strict=True)
        if re.findall(r"\d+", text) != [str(n) for n in range(a, b + 1)]
    ]
    return 1 - len(wrong) / len(cases), wrong


def parse_call(text: str) -> dict[str, Any] | None:
    """Return the single tool call in `text`, or None."""
    match = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text.strip(), re.DOTALL)
    try:
        return dict(json.loads(match.group(1))) if match else None
    except (json.JSONDecodeError, TypeError):
        return None


def score_weather(model: Model, cities: Sequence[str], question: str) -> dict[str, Any]:
    """Compute the shares of: calls that parse, calls with the city asked for, final answers with city and
    temperature.
    """
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": question.format(city=city)}] for city in cities
    ]
    calls = [parse_call(text) for text in model.chat(chats, [WEATHER_TOOL], max_new=48)]
    wanted = [{"name": "get_weather", "arguments": {"city": city}} for city in cities]
    degrees = [(7 * index) % 38 - 5 for index in range(len(cities))]
    for messages, call, value in zip(chats, wanted, degrees, strict=True):
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": call}]})
        result = json.dumps({"temperature": value, "condition": condition_for(value)})
        messages.append({"role": "tool", "content": result})
    answers = model.chat(chats, [WEATHER_TOOL], max_new=40)
    repeats = [
        f" {value} " in text and city in text
        for text, city, value in zip(answers, cities, degrees, strict=True)
    ]
    return {
        "parses": float(np.mean([call is not None for call in calls])),
        "right_city": float(np.mean([call == want for call, want in zip(calls, wanted, strict=True)])),
        "answer_repeats": float(np.mean(repeats)),
        "wrong": [str(call) for call, want in zip(calls, wanted, strict=True) if call != want],
        "wrong_answers": [text for text, good in zip(answers, repeats, strict=True) if not good],
    }


def condition_for(value: int) -> str:
    """Choose a sky to go with a temperature."""
    return "snowy" if value < 1 else "rainy" if value < 12 else "cloudy" if value < 20 else "sunny"


QUESTIONS = [
    "hi",
    "Hello!",
    "who are you?",
    "What can you do?",
    "what is 3 + 4?",
    "3+4=",
    "12+9",
    "What is nine plus six?",
    "count to 5",
    "Count from 3 to 9",
    "count down from 10 to 1",
    "What day comes after Monday?",
    "What is the opposite of hot?",
    "What colour is the sky?",
    "What does a cow say?",
    "How many legs does a spider have?",
    "what's the weather in Paris?",
    "Who is the president of France?",
    "Write a Python function",
    "thanks",
]


def main() -> None:
    """Print samples and figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--stories", type=int, default=4, help="stories to sample at temperature 0.7")
    parser.add_argument("--quick", action="store_true", help="stories and questions only")
    args = parser.parse_args()
    model = Model.load(args.checkpoint)
    for question, answer in zip(QUESTIONS, model.ask(QUESTIONS), strict=True):
        print(f"> {question}\n{answer}")
    print("\n--- greedy: Once upon a time" + model.complete(["Once upon a time"], max_new=400)[0])
    for text in model.complete(["Once upon a time"] * args.stories, max_new=300, temperature=0.7, seed=1):
        print("\n--- 0.7: Once upon a time" + text)
    print(
        "\n--- tell me a story about a fox:\n" + model.ask(["Tell me a story about a fox."], max_new=400)[0]
    )
    if args.quick:
        return
    for pattern in ("What is {a} + {b}?", "{a}+{b}=", "what is {a} plus {b}?"):
        print(f"sums {pattern!r}: {score_sums(model, pattern):.3f}")
    share, wrong = score_counts(model)
    print(f"counts: {share:.3f}", *wrong, sep="\n  ")
    for name, cities in (("listed", words("cities")[:40]), ("unseen", UNSEEN_CITIES)):
        for question in ("What's the weather in {city}?", "what is the weather like in {city}"):
            print(
                f"weather, {name} cities, {question!r}: {json.dumps(score_weather(model, cities, question))}"
            )


if __name__ == "__main__":
    main()
